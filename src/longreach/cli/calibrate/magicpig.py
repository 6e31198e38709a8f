"""`longreach calibrate magicpig`: bits and tables of each layer, and dense layers, for a budget of bytes."""

from __future__ import annotations

import argparse

from longreach.cli.calibrate.common import Work, add_prompts
from longreach.cli.common import count, positive
from longreach.errors import InvalidInput

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


def run(args: argparse.Namespace) -> int:
    from longreach.methods.magicpig import MagicPIG
    from longreach.methods.magicpig.calibrate import tokens_needed
    from longreach.methods.magicpig.plan import Options

    if not 0 < args.budget <= 1:
        raise InvalidInput(f"budget: expected a share in (0, 1], got {args.budget}; choose another --budget")
    if args.memory is not None and not args.memory > 0:
        raise InvalidInput(f"memory: expected a share > 0, got {args.memory}; choose another --memory")
    given = {
        "seed": args.hash_seed, "least": args.least, "share": args.share, "sinks": args.sinks, "local": args.local,
        "seal": args.seal, "centre": args.centre,
    }  # fmt: skip
    schedule = MagicPIG(**given).schedule  # the method checks its options
    gathered = {"rows": args.rows, "keys": args.keys}
    settings = {**gathered, **{"hash_seed" if name == "seed" else name: value for name, value in given.items()}}
    work = Work(args, settings, least=lambda shape: tokens_needed(schedule, args.rows))
    from longreach.evals.calibration.magicpig import MagicPIGGather, calibrated

    what = MagicPIGGather(work.shape, Options(**given), **gathered)
    chosen = {"budget": args.budget, "memory": args.memory}
    found = calibrated(what, work.gather(what), **chosen, length=args.length)
    plan = work.save(found.values(), found.arrays(), **chosen)
    return work.show_plan(plan)
