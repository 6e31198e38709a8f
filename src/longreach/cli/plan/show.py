"""`longreach plan show`: a plan's contents, and how it was made."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_json
from longreach.cli.plan.common import SHOWN, add_plan, opened
from longreach.cli.show import console, emit
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.plans import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="draw the plan: similarity of layers "
                        "(kascade), or expected errors and bytes (magicpig); extra `report`")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    plan = opened(args.plan)
    if args.output is not None:
        _draw(plan, args.output)
    if args.json:
        emit(describe(plan))
    else:
        show(plan)
    return 0


def describe(plan: Plan) -> dict[str, Any]:
    """As JSON: all but the arrays' numbers, and what the plan's kind makes of those."""
    about = _module(plan).about(plan) if plan.kind in SHOWN else {}
    return {
        "kind": plan.kind,
        "model": asdict(plan.model),
        "values": dict(plan.values),
        "arrays": {name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
                   for name, x in plan.arrays.items()},
        "made": {f.name: getattr(plan.made, f.name) for f in fields(plan.made)},
        **about,
    }  # fmt: skip


def show(plan: Plan) -> None:
    """The model and the making, then what the kind has to show."""
    out, model, made = console(), plan.model, plan.made
    out.print(
        f"{plan.kind} plan for {model.name}: {model.layers} layers, {model.query_heads} query and {model.kv_heads} KV "
        f"heads of {model.head_dim}, configuration {model.config[:12]}"
    )
    settings = ", ".join(f"{name} {value}" for name, value in made.settings.items())
    commit = f" ({made.commit[:12]}{'+dirty' * made.commit.endswith('+dirty')})" if made.commit else ""
    sha256 = f" (sha256 {made.sha256[:12]})" if made.sha256 else ""
    out.print(f"made of {made.data}: {made.tokens} tokens{sha256}; {settings}; seed {made.seed}; "
              f"longreach {made.longreach}{commit}, torch {made.torch}, transformers {made.transformers}, "
              f"{made.device}")  # fmt: skip
    out.print()
    if plan.kind in SHOWN:
        _module(plan).show(plan, out)
        return
    for name, value in plan.values.items():
        out.print(f"{name}: {value}")
    for name, x in plan.arrays.items():
        out.print(f"{name}: {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")


def _module(plan: Plan) -> Any:
    return import_module(SHOWN[plan.kind])


def _draw(plan: Plan, path: Path) -> None:
    """The kind's picture, whole or not at all."""
    if plan.kind not in SHOWN or not hasattr(_module(plan), "picture"):
        raise InvalidInput(f"a {plan.kind} plan has no picture; leave --output out")
    from longreach.records.report.plots import check_installed
    from longreach.records.report.writing import write_all

    check_installed()
    write_all(path.parent, {path.name: _module(plan).picture(plan)})
