"""`longreach plan verify`: whether a plan is whole, and made for a model."""

from __future__ import annotations

import argparse

from longreach.cli.common import add_json
from longreach.cli.plan.common import add_plan, located, view
from longreach.cli.show import console, emit
from longreach.errors import InvalidInput

UNFIT = 1  # exit code where the plan is broken, or for another model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("--model", required=True, metavar="DIR|mini", help="a model directory in transformers' format, "
                        "or 'mini'; its configuration alone is read")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import shape_at
    from longreach.plans import load

    path, kind = located(args.plan)
    shape = shape_at(args.model)
    fault = None
    try:
        plan = load(path, kind)
        view(plan)
        plan.check(shape, f"the plan {args.plan}")
    except InvalidInput as error:
        fault = " ".join(str(error).split())
    if args.json:
        emit({"plan": str(path), "model": args.model, "fits": fault is None, "fault": fault})
    elif fault is None:
        console().print(f"{args.plan} is whole, and a {kind} plan for this model", soft_wrap=True)
    else:
        console().print(fault, soft_wrap=True)
    return 0 if fault is None else UNFIT
