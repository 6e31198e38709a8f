"""`longreach calibrate kascade`: which layers choose keys for the others, and whose keys each head takes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import Work, add_prompts
from longreach.cli.common import positive
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.methods.call import ModelShape

HELP = "choose Kascade's anchor layers and head map by how much attention weight layers find among each other's keys"
EXAMPLES = (
    "longreach calibrate kascade --model mini --tasks vt,cwe --text book.txt --output plan.json",
    "longreach calibrate kascade --model ./Llama-3.1-8B-Instruct --text book.txt --length 8192 --prompts 32 \\",
    "    --output llama.json --json",
)
FEW = 4  # tiles: the least over so few means little


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


def run(args: argparse.Namespace) -> int:
    from longreach.methods.kascade.calibrate import tokens_needed
    from longreach.methods.kascade.calibration_result import SERVED

    if args.budget is not None and args.served is not None:
        raise InvalidInput("--budget fixes the number of anchors, and --served finds one; give one of them")
    if args.budget is not None and args.budget < 1:
        raise InvalidInput(f"budget: expected at least 1 anchor, got {args.budget}; choose another --budget")
    served = SERVED if args.served is None else args.served
    if not 0 <= served <= 1:
        raise InvalidInput(f"served: expected a share in [0, 1], got {served}; choose another --served")
    work = Work(
        args,
        {"k": args.k, "tile": args.tile},
        least=lambda shape: tokens_needed(args.k, args.tile, shape.query_heads // shape.kv_heads),
        fits=lambda shape: _check(args, shape),
    )
    from longreach.evals.calibration.kascade import KascadeGather, calibrated

    _tell_few(args, work)
    found = calibrated(work.gather(KascadeGather(work.shape, k=args.k, tile=args.tile)))
    found = replace(found, ranks=args.ranks, weighted=args.weighted == "yes")
    chosen = found.plan(args.budget, args.k, args.tile, served)
    how = {"budget": len(chosen.anchors), **({"served": served} if args.budget is None else {})}
    plan = work.save(found.values(chosen), found.arrays(), **how, ranks=args.ranks, weighted=found.weighted)
    return work.show_plan(plan)


def _check(args: argparse.Namespace, shape: ModelShape) -> None:
    """Raise InvalidInput where options do not fit the model."""
    from longreach.methods.kascade.anchors import check_anchors
    from longreach.methods.kascade.calibration_result import check_ranks

    if args.budget is not None:
        check_anchors(args.budget, shape.layers)
    check_ranks(args.ranks, shape.kv_heads)


def _tell_few(args: argparse.Namespace, work: Work) -> None:
    """A line on stderr where the shortest prompt has few tiles to compare."""
    from longreach.methods.kascade.calibrate import tile_tokens

    tokens = tile_tokens(args.tile, work.shape.query_heads // work.shape.kv_heads)
    length = min(len(prompt.tokens) for prompt in work.prompts.prompts)
    tiles = sum(start > args.k for start in range(0, length, tokens))
    if tiles < FEW:
        told = (
            f"the shortest prompt has {length} tokens, and {tiles} of its tiles of {tokens} tokens more than {args.k}"
        )
        print(f"longreach: {told} keys before them: too few to go by; raise --length", file=sys.stderr)
