"""`longreach plan break-even`: the context from which Kascade is faster than dense attention on this machine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from longreach.cli.common import add_device, add_json, seed
from longreach.cli.plan.common import add_plan, located, opened
from longreach.cli.show import Column, Table, console, emit, progress
from longreach.errors import InvalidInput, OutOfMemory

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from longreach.bench.break_even import Compared
    from longreach.methods.call import Phase
    from longreach.plans import Plan

SHORTEST, LONGEST, LONGEST_ON_CPU = 512, 64 * 1024, 4096
FEWEST = 2  # tokens: a decode step has one before its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("--output", "--out", type=Path, metavar="PLAN.json", help="the plan with the values of this "
                        "device (default: PLAN itself is replaced; a shipped plan needs a file)")  # fmt: skip
    parser.add_argument("--contexts", type=_contexts, metavar="N,N", help=f"tokens to measure at (default: {SHORTEST}, "
                        f"then each time twice as many, up to {LONGEST} or what fits, on a CPU "
                        f"{LONGEST_ON_CPU})")  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the inputs (default 0)")
    add_device(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import device_of
    from longreach.methods.kascade.plan import KascadePlan
    from longreach.plans import device_name, shipped
    from longreach.records.record import check_writable

    plan, (path, kind) = opened(args.plan), located(args.plan)
    if kind != "kascade":
        raise InvalidInput(f"{args.plan} is a {kind} plan; only those of kascade have a break-even")
    if args.output is None and path in shipped(kind).values():
        raise InvalidInput(f"{args.plan} is a shipped plan, which is not replaced; give --output PLAN.json")
    output: Path = args.output or path
    check_writable(output)
    device, view = device_of(args.device), KascadePlan.of(plan)
    phases: tuple[Phase, ...] = ("decode",) if view.tile is None else ("decode", "prefill")
    out = None if args.json else console()
    found = _measure(args, plan, path, device, phases, out)
    name, before = device_name(device), {device: dict(values) for device, values in view.dense_below.items()}
    limits = {phase: _limit(each) for phase, each in found.items()}
    new = replace(plan, values={**plan.values, "dense_below": {**before, name: limits}})
    new.save(output)
    if out is None:
        measured = {phase: [one._asdict() for one in each] for phase, each in found.items()}
        emit({"plan": args.plan, "output": str(output), "device": name, "dense_below": limits, "seconds": measured})
        return 0
    out.print()
    for phase, tokens in limits.items():
        out.print(f"{phase} on {name}: {_words(tokens, found[phase])}", soft_wrap=True)
    out.print(f"written to {output}; times are of attention in one layer, the mean of all, at batch 1", soft_wrap=True)
    return 0


def _measure(
    args: argparse.Namespace, plan: Plan, path: Path, device: torch.device, phases: tuple[Phase, ...],
    out: Console | None,
) -> dict[Phase, list[Compared]]:  # fmt: skip
    """Phase -> each context that fits the device. Raises InvalidInput if not even the first one does."""
    import torch

    from longreach.bench.break_even import compare
    from longreach.bench.memory import release

    contexts = args.contexts or _doubling(LONGEST_ON_CPU if device.type == "cpu" else LONGEST)
    found: dict[Phase, list[Compared]] = {phase: [] for phase in phases}
    table = None if out is None else Table(out, [Column("phase", 8, left=True), Column("tokens", 7),
                                                 Column("kascade", 12), Column("dense", 12),
                                                 Column("speed", 7)])  # fmt: skip
    if table is not None:
        table.header()
    with progress("contexts", len(phases) * len(contexts)) as advance:
        for phase in phases:
            for number, context in enumerate(contexts):
                try:
                    one = compare(plan, path, phase, context, device, args.seed)
                except (OutOfMemory, torch.OutOfMemoryError):
                    if not found[phase]:
                        raise InvalidInput(
                            f"--contexts: {context} tokens do not fit the memory of this device; give fewer"
                        ) from None
                    advance(len(contexts) - number)
                    break
                finally:
                    release(device)
                found[phase].append(one)
                if table is not None:
                    times = (f"{1e6 * seconds:.1f} us" for seconds in (one.kascade, one.dense))
                    table.row([phase, str(context), *times, f"{one.speed:.2f}x"])
                advance(1)
    return found


def _limit(found: list[Compared]) -> int:
    from longreach.bench.break_even import break_even

    return break_even(found)


def _words(tokens: int, found: list[Compared]) -> str:
    if not tokens:
        return f"Kascade is faster at {found[0].context} tokens and more; dense attention is never taken for its speed"
    if tokens > found[-1].context:
        return (
            f"Kascade is not faster at {found[-1].context} tokens; dense attention below {tokens} tokens; "
            f"longer contexts were not measured; --contexts measures them"
        )
    return f"Kascade is faster from {tokens} tokens on; dense attention below"


def _doubling(longest: int) -> tuple[int, ...]:
    return tuple(SHORTEST << n for n in range((longest // SHORTEST).bit_length()))


def _contexts(text: str) -> tuple[int, ...]:
    """ "512,4096" -> (512, 4096), ascending."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < FEWEST:
        raise argparse.ArgumentTypeError(f"expected numbers of tokens such as 512,4096, from {FEWEST} on, got {text!r}")
    return found
