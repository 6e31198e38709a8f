"""`longreach plan figures`: the pictures of a method's paper, of a plan and its model.

A kind of plan is a file of this folder, in KINDS. It has OPTIONS ({argument: default} of those that others have not),
`measure(args, plan) -> (CalibrationRun, numbers)`, `draw(plan, numbers) -> {file name: PNG}` and `show(numbers)`,
tables.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from longreach.cli.calibrate.common import add_prompts
from longreach.cli.common import count, positive
from longreach.cli.plan.common import add_plan, opened
from longreach.cli.show import console, emit, place, waiting
from longreach.errors import InvalidInput

KINDS = ("kascade", "mac")
FORMAT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    add_prompts(parser, output=False)
    parser.add_argument("--tiles", type=positive, metavar="N", help="kascade: tiles measured in each prompt "
                        "(default 8)")  # fmt: skip
    parser.add_argument("--rows", type=positive, metavar="N", help="mac: rows measured in each prompt (default 32)")
    parser.add_argument("--window", type=positive, metavar="N", help="mac: the widest window (default 2048); rows "
                        "measured come after at least this many tokens")  # fmt: skip
    parser.add_argument(
        "--band", type=positive, metavar="N", help="mac: the band of figures at a single band (default 256)"
    )
    parser.add_argument("--tau", type=float, metavar="X", help="mac: the threshold, in sqrt(2 d), of figures at a "
                        "single threshold (default 0.75)")  # fmt: skip
    parser.add_argument("--sinks", type=count, metavar="N", help="mac: first tokens that no entry holds (default 0)")
    parser.add_argument("--steps", type=count, metavar="N", help="mac: tokens to generate after the first prompt, for "
                        "depth and drift (default 256; 0: none)")  # fmt: skip
    parser.add_argument("--depth", type=positive, action="append", metavar="N", help="mac: a limit on chains of reuse "
                        "there, measured in addition to no limit; may be given several times (default 32)")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder for the pictures and a "
                        "record; the same command continues an interrupted run")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from longreach.records import write
    from longreach.records.report.plots import check_installed
    from longreach.records.report.writing import write_all

    check_installed()
    plan = opened(args.plan)
    if plan.kind not in KINDS:
        raise InvalidInput(f"{args.plan} is a {plan.kind} plan; these pictures are of {' and '.join(KINDS)} plans")
    module = _modules()[plan.kind]
    _take_options(args, plan.kind)
    work, found = module.measure(args, plan)
    record = {
        "kind": f"{plan.kind} figures", "format": FORMAT, "model": work.about, "plan": dict(plan.values),
        "data": work.prompts.data, "sha256": work.prompts.sha256, "tokens": work.prompts.tokens,
        "config": work.settings, **work.where, "results": found,
    }  # fmt: skip
    with waiting("drawing"):
        written = write_all(args.output, module.draw(plan, found))
    write(args.output / module.RECORD, record)
    work.journal.remove()
    if args.json:
        emit(record)
    else:
        module.show(found)
        console().print(place(work.where))
        for path in written:
            console().print(str(path), soft_wrap=True)
    return 0


def _modules() -> dict[str, Any]:
    return {kind: import_module(f"{__name__}.{kind}") for kind in KINDS}


def _take_options(args: argparse.Namespace, kind: str) -> None:
    """Defaults of the kind's own options. Raises InvalidInput where one of another kind is given."""
    for other, module in _modules().items():
        for name, default in module.OPTIONS.items():
            given = getattr(args, name) is not None
            if other != kind and given:
                raise InvalidInput(f"--{name} is for {other} plans, and {args.plan} is a {kind} plan; leave it out")
            if other == kind and not given:
                setattr(args, name, default)
