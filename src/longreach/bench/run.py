"""Run a case: inputs, ours, baselines at their best, all checked, all timed in turns; the result as a record's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from longreach.bench.baselines import baseline
from longreach.bench.case import KASCADE_PREFILL, TOP_K, Case, Memory
from longreach.bench.check import bound, require_right
from longreach.bench.competitor import Competitor, ours
from longreach.bench.inputs import Inputs, bytes_needed, flops_needed
from longreach.bench.kascade_prefill import run_kascade_prefill
from longreach.bench.mac.run import run_mac
from longreach.bench.magicpig.run import run_magicpig
from longreach.bench.mka.run import run_mka
from longreach.bench.stack import run_stack
from longreach.bench.sweep import Sweeps, best
from longreach.bench.targets import judge
from longreach.bench.timing import Timing, measure
from longreach.bench.top_k import run_top_k
from longreach.ops.attend.api import resolve

Say = Callable[[str], None]
REPLAYS = 21
QUICK = 7


def run_case(
    case: Case, device: torch.device, *, without: Iterable[str] = (), replays: int = REPLAYS, seed: int = 0,
    say: Say = lambda line: None, sweeps: Sweeps | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a case. without: baselines left out, which the result names. sweeps: results of the run's earlier cases.

    Raises Unsupported where a baseline cannot be loaded, BaselineFailed where it does not work, WrongResult for outputs
    of ours that are wrong before or any that are wrong after all were timed; OutOfMemory where a case does not fit.
    """
    names = [name for name in case.baselines if name not in set(without)]
    if case.group == TOP_K:
        return run_top_k(case, device, replays=replays, seed=seed)
    if case.reuse:
        return run_mac(case, device, without=without, replays=replays, seed=seed, say=say, sweeps=sweeps)
    if case.sampling:
        return run_magicpig(case, device, without=without, replays=replays, seed=seed, say=say, sweeps=sweeps)
    if case.trained:
        return run_mka(case, device, without=without, replays=replays, seed=seed, say=say, sweeps=sweeps)
    if case.group == KASCADE_PREFILL:
        return run_kascade_prefill(case, device, without=without, replays=replays, seed=seed, say=say)
    if case.stack:
        return run_stack(case, device, without=without, replays=replays, seed=seed, say=say)
    versions: dict[str, str] = {}
    for name in names:
        versions |= baseline(name).load()
    say(f"{case.name}: {case.shape.batch} x {case.shape.context} keys")
    inputs = Inputs(case, device, seed)
    auto = _auto(inputs) if case.prefill else None
    impls = sorted(case.impls, key=lambda impl: impl != auto)  # what "auto" means comes first
    layouts = [(memory, case.shape.rows) for memory in case.memories]
    layouts += [(Memory(), rows) for rows in case.also_rows]
    mine = [ours(inputs, memory, rows, impl) for impl in impls for memory, rows in layouts]
    for competitor in mine:
        _checked(competitor, inputs)
    tried: dict[str, Any] = {}
    rivals: list[Competitor] = []
    for name in names:
        found, tests = best(name, inputs, say)
        tried[name] = [asdict(test) for test in tests]
        rivals += found
    everyone = [*mine, *rivals]
    replays, warm_up = min(replays, case.replays or replays), 1 if case.prefill else 3
    times = measure({c.name: c.calls for c in everyone}, device, replays=replays, warm_up=warm_up)
    errors = {c.name: _checked(c, inputs) for c in everyone}  # again: state that calls leave behind would show now
    needed = bytes_needed(case)
    flops = flops_needed(case) if case.prefill else None
    entries = [_entry(c, times[c.name], needed, flops, errors[c.name]) for c in everyone]
    return {
        "shape": asdict(case.shape),
        "reads": asdict(case.reads),
        "bytes_needed": needed,
        **({"flops_needed": flops, "auto": auto} if case.prefill else {}),
        "copies": inputs.copies,
        "seed": seed,
        "error_bound": bound(inputs.dtype),
        "timing": {"how": next(iter(times.values())).how, "replays": replays, "warm_up": warm_up},
        "baselines": {"versions": versions, "left_out": sorted(set(case.baselines) - set(names)), "tried": tried},
        "entries": entries,
        "targets": judge(case, entries),
    }


@torch.no_grad()
def _auto(inputs: Inputs) -> str:
    """The implementation that impl="auto" means for the case."""
    rows = inputs.shape.rows
    return resolve("auto", inputs.rows(0, rows), inputs.view(0, Memory()), inputs.selection(0, rows))


def _checked(competitor: Competitor, inputs: Inputs) -> float:
    with torch.no_grad():
        out = competitor.output(competitor.calls[0]())
    return require_right(competitor.name, inputs, competitor.memory, competitor.rows, out)


def _entry(competitor: Competitor, timing: Timing, needed: int, flops: int | None, error: float) -> dict[str, Any]:
    return {
        "name": competitor.name,
        "who": competitor.who,
        "settings": {"memory": competitor.memory.label, "rows": competitor.rows, **competitor.settings},
        **timing.recorded(),
        "tb_per_s": needed / timing.median / 1e12,
        **({"tflop_per_s": flops / timing.median / 1e12} if flops else {}),
        "error": error,
    }
