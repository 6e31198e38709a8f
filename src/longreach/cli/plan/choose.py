"""`longreach plan choose`: other anchors, or another head map, from the same calibration. No model is needed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_json, positive
from longreach.cli.plan.common import add_plan, opened
from longreach.cli.plan.show import describe, show
from longreach.cli.show import emit
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.methods.kascade.calibration_result import CalibrationResult

HEADS = ("mapped", "own")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--budget", type=int, metavar="N", help="the best N anchors")
    which.add_argument("--served", type=float, metavar="SHARE", help="the fewest anchors with which every layer finds "
                       "this share of its best attention weight on the keys of its anchor")  # fmt: skip
    which.add_argument("--evenly", type=int, metavar="N", help="N anchors at even distances")
    which.add_argument("--anchors", type=_layers, metavar="L,L", help="these layers")
    parser.add_argument("--heads", choices=HEADS, default="mapped", help="keys that a head takes: those of the head "
                        "that serves it best (the default), or those of the head with its own number")  # fmt: skip
    parser.add_argument("--weighted", choices=("yes", "no"), help="whether layers count by how much their attention "
                        "turns the residual stream, or all equally (default: as before)")  # fmt: skip
    parser.add_argument("--ranks", type=positive, metavar="N", help="of tensor parallelism: heads take keys of heads "
                        "on their own rank only (default: as many as before)")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="PLAN.json", help="the new plan")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.methods.kascade.calibration_result import CalibrationResult
    from longreach.methods.kascade.plan import KascadePlan

    plan = opened(args.plan)
    if plan.kind != "kascade":
        raise InvalidInput(f"{args.plan} is a {plan.kind} plan; only those of kascade have anchors to choose")
    found, before = CalibrationResult.of(plan), KascadePlan.of(plan)
    weighted = found.weighted if args.weighted is None else args.weighted == "yes"
    found = replace(found, ranks=args.ranks or found.ranks, weighted=weighted)
    how, places = _places(args, found)
    chosen = found.with_anchors(places, before.k, before.tile)
    if args.heads == "own":
        own = tuple(range(plan.model.kv_heads))
        chosen = replace(chosen, head_map=(own,) * plan.model.layers)
    settings: dict[str, Any] = {
        **plan.made.settings, "budget": len(places), "ranks": found.ranks, "weighted": weighted, "anchors": how,
        "heads": args.heads,
    }  # fmt: skip
    new = replace(plan, values=found.values(chosen), made=replace(plan.made, settings=settings))
    new.save(args.output)
    if args.json:
        emit({**describe(new), "output": str(args.output)})
    else:
        show(new)
    return 0


def _places(args: argparse.Namespace, found: CalibrationResult) -> tuple[str, tuple[int, ...]]:
    """(how they were chosen, places of the anchors among the layers of full attention)."""
    from longreach.methods.kascade.anchors import choose, evenly, fewest

    if args.budget is not None:
        return "best", choose(found.similarity, args.budget).anchors
    if args.served is not None:
        return f"fewest that serve {args.served:g}", fewest(found.similarity, found.plain, args.served).anchors
    if args.evenly is not None:
        return "evenly spaced", evenly(len(found.layers), args.evenly)
    layers = tuple(sorted(set(args.anchors)))
    strange = [layer for layer in layers if layer not in found.layers]
    if strange or found.layers[0] not in layers:
        raise InvalidInput(
            f"--anchors: expected some of the layers of full attention ({', '.join(map(str, found.layers))}), the "
            f"first of them among them, got {', '.join(map(str, args.anchors))}"
        )
    return "given", tuple(found.layers.index(layer) for layer in layers)


def _layers(text: str) -> tuple[int, ...]:
    """ "0,6" -> (0, 6)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layer numbers such as 0,6, got {text!r}") from None
