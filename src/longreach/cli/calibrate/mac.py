"""`longreach calibrate mac`: how wide MAC's bands and windows must be, and how near is near enough, layer by layer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import add_prompts
from longreach.cli.common import count, positive

if TYPE_CHECKING:
    from longreach.evals.calibration.base import Calibration

HELP = "find MAC's bands, windows and thresholds, and the energy of a model's keys, layer by layer"
EXAMPLES = (
    "longreach calibrate mac --model mini --tasks vt,cwe --text book.txt --output mac.json",
    "longreach calibrate mac --model ./Llama-3.1-8B-Instruct --text book.txt --length 8192 --alpha 0.001 \\",
    "    --epsilon 0.01 --output mac.json --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser)
    parser.add_argument("--epsilon", type=float, default=0.05, metavar="X", help="weight that may lie before a row's "
                        "band (default 0.05)")  # fmt: skip
    parser.add_argument("--alpha", type=float, default=0.01, metavar="X", help="share of pairs of unrelated queries "
                        "that may match (default 0.01)")  # fmt: skip
    parser.add_argument("--window", type=positive, default=1024, metavar="N",
                        help="the widest window that is tried (default 1024)")  # fmt: skip
    parser.add_argument("--widest", type=positive, default=512, metavar="N", help="the widest band; a layer that needs "
                        "a wider one reuses nothing (default 512)")  # fmt: skip
    parser.add_argument("--sinks", type=count, default=4, metavar="N", help="first tokens, left out of the weight "
                        "(default 4)")  # fmt: skip
    parser.add_argument("--rows", type=positive, default=64, metavar="N",
                        help="rows measured in a prompt (default 64)")  # fmt: skip


def options(args: argparse.Namespace) -> Calibration:
    from longreach.evals.calibration.run import calibration

    names = ("epsilon", "alpha", "window", "widest", "sinks", "rows")
    return calibration("mac", **{name: getattr(args, name) for name in names})
