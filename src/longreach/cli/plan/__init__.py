"""`longreach plan`: a plan's contents, its fit to a model, its break-even, and how far two plans agree."""

from __future__ import annotations

import argparse

from longreach.cli.common import add_command
from longreach.cli.plan import break_even, choose, compare, figures, show, verify

NAME = "plan"
HELP = "show, check and compare plans, the results of calibration"
EXAMPLES = (
    "longreach plan show kascade-longreach-mini",
    "longreach plan show plan.json --output similarity.png",
    "longreach plan verify plan.json --model ./Llama-3.1-8B-Instruct --json    (exit code 1 if it does not fit)",
    "longreach plan choose plan.json --budget 4 --output four.json",
    "longreach plan break-even plan.json",
    "longreach plan compare plan.json other.json --budget 5",
    "longreach plan figures plan.json --model mini --tasks vt,cwe --output figures",
    "longreach plan figures mac.json --model mini --text book.txt --length 8192 --steps 1024 --output figures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for module, name, help_text in (
        (show, "show", "show a plan's contents, and how it was made"),
        (verify, "verify", "check that a plan is whole, and made for a model"),
        (choose, "choose", "choose other anchors of a kascade plan's calibration, and make a plan with them"),
        (break_even, "break-even", "measure from which context a kascade plan is faster than dense attention here"),
        (compare, "compare", "compare two kascade plans for one model, calibrated on different texts"),
        (figures, "figures", "draw the papers' figures behind a kascade or mac plan"),
    ):
        action = add_command(actions, name, help_text)
        module.add_arguments(action)
        action.set_defaults(act=module.run)


def run(args: argparse.Namespace) -> int:
    return int(args.act(args))
