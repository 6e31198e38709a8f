"""`longreach mka`: convert a model to MKA, FastMKA or Block-MKA, distil its index, heal it, show its routing."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from longreach.cli.common import add_command

NAME = "mka"
HELP = "convert a model to MKA, FastMKA or Block-MKA, train it, and show its routing"
ACTIONS = ("convert", "index", "train", "routing")


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
