"""`longreach mka`: convert a model to MKA, FastMKA or Block-MKA, distil its index of blocks, heal it."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from longreach.cli.common import add_command

NAME = "mka"
HELP = "convert a model to MKA, FastMKA or Block-MKA, and train it"
ACTIONS = ("convert", "index", "train")


def _module(action: str) -> Any:
    return import_module(f"longreach.cli.mka.{action}")


EXAMPLES = tuple(line for action in ACTIONS for line in _module(action).EXAMPLES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in ACTIONS:
        module = _module(action)
        module.add_arguments(add_command(actions, action, module.HELP, module.EXAMPLES))


def run(args: argparse.Namespace) -> int:
    return int(_module(args.action).run(args))
