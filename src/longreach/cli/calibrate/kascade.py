"""`longreach calibrate kascade`: which layers choose keys for the others, and whose keys each head takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import add_prompts
from longreach.cli.common import positive

if TYPE_CHECKING:
    from longreach.evals.calibration.base import Calibration

HELP = "choose Kascade's anchor layers and head map by how much attention weight layers find among each other's keys"
EXAMPLES = (
    "longreach calibrate kascade --model mini --tasks vt,cwe --text book.txt --output plan.json",
    "longreach calibrate kascade --model ./Llama-3.1-8B-Instruct --text book.txt --length 8192 --prompts 32 \\",
    "    --output llama.json --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser)
    parser.add_argument("--budget", type=int, metavar="N", help="layers that choose keys, the first layer among them "
                        "(default: the fewest that meet --served)")  # fmt: skip
    parser.add_argument("--served", type=float, metavar="SHARE", help="without --budget: share of its best attention "
                        "weight that every layer must find on the keys of its anchor (default 0.6)")  # fmt: skip
    parser.add_argument("--weighted", choices=("yes", "no"), default="no", help="whether layers count by how much "
                        "their attention turns the residual stream, as in the paper, or all equally "
                        "(default no)")  # fmt: skip
    parser.add_argument("--ranks", type=positive, default=1, metavar="N", help="of tensor parallelism: heads take keys "
                        "of heads on their own rank only (default 1)")  # fmt: skip
    parser.add_argument("--k", type=positive, default=64, metavar="N",
                        help="keys that a tile chooses while layers are compared (default 64)")  # fmt: skip
    parser.add_argument("--tile", type=positive, default=128, metavar="N", help="query rows that choose together, the "
                        "query heads of a KV head counted (default 128)")  # fmt: skip


def options(args: argparse.Namespace) -> Calibration:
    from longreach.evals.calibration.run import calibration

    return calibration(
        "kascade", budget=args.budget, served=args.served, weighted=args.weighted == "yes", ranks=args.ranks, k=args.k,
        tile=args.tile,
    )  # fmt: skip
