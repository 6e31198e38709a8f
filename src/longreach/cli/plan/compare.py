"""`longreach plan compare`: compare two kascade plans for one model, calibrated on different texts."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from longreach.cli.common import add_json, positive
from longreach.cli.plan.common import add_plan, opened
from longreach.cli.show import Column, Table, console, emit, percent
from longreach.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    add_plan(parser, "other")
    parser.add_argument("--budget", type=positive, metavar="N",
                        help="anchors to choose for each plan (default: as many as PLAN has)")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.methods.kascade.calibration_result import CalibrationResult
    from longreach.methods.kascade.compare_plans import compare
    from longreach.methods.kascade.plan import KascadePlan

    one, other = opened(args.plan), opened(args.other)
    for name, plan in ((args.plan, one), (args.other, other)):
        if plan.kind != "kascade":
            raise InvalidInput(f"{name} is a {plan.kind} plan; kascade plans alone can be compared")
    other.check(one.model, f"the plan {args.other}")
    budget = args.budget or len(KascadePlan.of(one).anchors)
    found = compare(CalibrationResult.of(one), CalibrationResult.of(other), budget)
    if args.json:
        emit({"plans": [args.plan, args.other], "budget": budget, **asdict(found)})
        return 0
    out = console()
    table = Table(out, [Column("calibrated on", 40, left=True), Column("anchors", 20, left=True),
                        Column("kept", 7)])  # fmt: skip
    table.header()
    for plan, anchors, kept in zip((one, other), found.anchors, found.kept):
        table.row([plan.made.data, " ".join(map(str, anchors)), percent(kept)])
    out.print(
        f"\n{found.shared} of {budget} anchors are the same. kept: what these anchors are worth on the other's "
        f"similarities, over the best that is possible there. With the first's anchors {percent(found.heads)} of the "
        f"heads are mapped the same, and the first's map gives {percent(found.given)} of the best by the other's "
        f"similarities. Correlation of similarities {_number(found.similarity)}, of importance "
        f"{_number(found.importance)}."
    )
    return 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
