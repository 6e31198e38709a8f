"""`longreach calibrate`: plans, made of what a model does with a text.

A kind of plan is a file of this folder and a name in KINDS. The file has HELP, EXAMPLES, `add_arguments(parser)`, which
calls `common.add_prompts`, and `options(args)`, the kind's `Calibration` of evals/calibration/<kind>.py.
`longreach.calibrate` makes the same plan in Python.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from longreach.cli.calibrate.common import write_plan
from longreach.cli.common import add_command

NAME = "calibrate"
HELP = "calibrate a method for a model and write a plan"
KINDS = ("kascade", "loki", "mac", "magicpig", "a3_deep")


def _module(kind: str) -> Any:
    return import_module(f"longreach.cli.calibrate.{kind}")


EXAMPLES = tuple(line for kind in KINDS for line in _module(kind).EXAMPLES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="METHOD", required=True)
    for kind in KINDS:
        module = _module(kind)
        module.add_arguments(add_command(kinds, kind, module.HELP, module.EXAMPLES))


def run(args: argparse.Namespace) -> int:
    return write_plan(args, _module(args.kind).options(args))
