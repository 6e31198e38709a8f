"""`longreach calibrate magicpig`: bits and tables of each layer, and dense layers, for a budget of bytes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import add_prompts
from longreach.cli.common import count, positive

if TYPE_CHECKING:
    from longreach.evals.calibration.base import Calibration

HELP = "choose MagicPIG's bits and tables for each layer, and its dense layers, by the expected error at a budget"
EXAMPLES = (
    "longreach calibrate magicpig --model mini --tasks vt,cwe --text book.txt --budget 0.2 --output plan.json",
    "longreach calibrate magicpig --model ./Llama-3.1-8B-Instruct --text book.txt --length 32768 --budget 0.05 \\",
    "    --memory 0.5 --output llama.json --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser)
    parser.add_argument("--budget", type=float, default=0.2, metavar="X", help="bytes that a decode step reads after "
                        "--length tokens, over dense attention's, all layers together (default 0.2)")  # fmt: skip
    parser.add_argument("--memory", type=float, metavar="X", help="maximum table memory over that of keys and "
                        "values, after --length tokens (default: no limit)")  # fmt: skip
    parser.add_argument("--rows", type=positive, default=16, metavar="N",
                        help="last rows of each prompt that are measured (default 16)")  # fmt: skip
    parser.add_argument("--keys", type=positive, default=1024, metavar="N",
                        help="keys of each prompt that are hashed to count reads (default 1024)")  # fmt: skip
    parser.add_argument("--hash-seed", type=count, default=0, metavar="N",
                        help="seed of the random projections, the method's `seed` (default 0)")  # fmt: skip
    parser.add_argument("--share", choices=("group", "own"), default="group", help="as the method (default group)")
    for name, default, help_text in (
        ("least", 2, "tables in which a key must collide"),
        ("sinks", 4, "first tokens that are always attended to"),
        ("local", 64, "last tokens that are always attended to"),
        ("seal", 256, "tokens that enter the tables together"),
        ("centre", 1024, "keys of the mean that is subtracted"),
    ):
        parser.add_argument(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"{help_text}, as the method (default {default})",
        )


def options(args: argparse.Namespace) -> Calibration:
    from longreach.evals.calibration.run import calibration

    names = ("budget", "memory", "rows", "keys", "hash_seed", "share", "least", "sinks", "local", "seal", "centre")
    return calibration("magicpig", **{name: getattr(args, name) for name in names})
