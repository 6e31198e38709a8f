"""`longreach calibrate`: plans, made of what a model does with a text.

A kind of plan is a file of this folder and a name in KINDS. The file has HELP, EXAMPLES, `add_arguments(parser)`, which
calls `common.add_prompts`, and `run(args) -> int`, which makes a `common.Work`, lets it gather (a `Gather` of
evals/calibration/<kind>.py takes what it needs of each prompt) or measure (where one dense read is not enough), makes
values and arrays of the parts (pure functions of methods/<kind>/calibrate.py, or of its plan) and gives them to
`Work.save`. Prompts, progress, the journal and a plan's account of its calibration are the same for all kinds.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

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
    return int(_module(args.kind).run(args))
