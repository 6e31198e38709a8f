"""`longreach plan verify`: whether a plan is whole, and made for a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from longreach.cli.common import add_json
from longreach.cli.plan.common import add_plan, located, view
from longreach.cli.show import console, emit
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.plans import Plan

UNFIT = 1  # exit code where the plan is broken, or for another model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("--model", required=True, metavar="DIR|mini", help="a model directory in transformers' format, "
                        "or 'mini'; its configuration alone is read")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import model_path, shape_at
    from longreach.plans import load

    path, kind = located(args.plan)
    shape = shape_at(args.model)
    fault = warning = None
    try:
        plan = load(path, kind)
        view(plan)
        plan.check(shape, f"the plan {args.plan}")
        warning = other_dtype(plan, model_path(args.model))
    except InvalidInput as error:
        fault = " ".join(str(error).split())
    if args.json:
        emit({"plan": str(path), "model": args.model, "fits": fault is None, "fault": fault, "warning": warning})
    elif fault is None:
        console().print(f"{args.plan} is whole, and a {kind} plan for this model", soft_wrap=True)
        if warning is not None:
            console().print(f"but {warning}", soft_wrap=True)
    else:
        console().print(fault, soft_wrap=True)
    return 0 if fault is None else UNFIT


def other_dtype(plan: Plan, model: Path) -> str | None:
    """A warning if a plan's distances are of another dtype than the model's configuration."""
    config = json.loads((model / "config.json").read_bytes())
    stated = (part.get(name) for part in (config, config.get("text_config") or {}) for name in ("dtype", "torch_dtype"))
    mine, made = next((x for x in stated if x is not None), None), plan.made.settings.get("dtype")
    if plan.kind != "mac" or mine is None or made is None or mine == made:
        return None
    return f"it was calibrated in {made}, and the model is stored in {mine}: its matches may differ a little"
