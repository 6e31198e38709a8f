"""`longreach calibrate loki`: the directions in which the keys of each layer and head vary most."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import add_prompts

if TYPE_CHECKING:
    from longreach.evals.calibration.base import Calibration

HELP = "find the directions in which a model's keys vary most, after rotation"
EXAMPLES = (
    "longreach calibrate loki --model mini --tasks vt,cwe --text book.txt --output loki.json",
    "longreach calibrate loki --model ./Llama-3.1-8B-Instruct --text book.txt --length 8192 --output loki.json --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser)


def options(args: argparse.Namespace) -> Calibration:
    from longreach.evals.calibration.run import calibration

    return calibration("loki")
