"""`longreach calibrate loki`: the directions in which the keys of each layer and head vary most."""

from __future__ import annotations

import argparse

from longreach.cli.calibrate.common import Work, add_prompts

HELP = "find the directions in which a model's keys vary most, after rotation"
EXAMPLES = (
    "longreach calibrate loki --model mini --tasks vt,cwe --text book.txt --output loki.json",
    "longreach calibrate loki --model ./Llama-3.1-8B-Instruct --text book.txt --length 8192 --output loki.json --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser)


def run(args: argparse.Namespace) -> int:
    work = Work(args, {}, least=lambda shape: 2)
    from longreach.evals.calibration.loki import LokiGather, calibrated

    plan = work.save({}, calibrated(work.gather(LokiGather(work.shape))).arrays())
    return work.show_plan(plan)
