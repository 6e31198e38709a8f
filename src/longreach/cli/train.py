"""`longreach train mini`: prepare the corpus, train longreach-mini."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from longreach.cli.common import add_device, add_json, positive
from longreach.cli.show import emit
from longreach.cli.train_card import EXAMPLE, add_card_arguments, run_card
from longreach.train.mini.config import SCHEDULES

NAME = "train"
HELP = "prepare the data of the model that longreach ships, and train it"
EXAMPLES = (
    "longreach train mini --prepare runs/mini-data",
    "longreach train mini --data runs/mini-data --out runs/mini --minutes 26",
    "longreach train mini --data runs/mini-data --out runs/longer --start runs/mini --schedule long --minutes 14",
    EXAMPLE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", choices=["mini"], help="which recipe")
    parser.add_argument("--prepare", metavar="DIR", type=Path, help="build corpus and tokenizer into DIR")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="with --prepare: use the tokenizer.json of this "
                        "folder, to train a model further that has it; without, a tokenizer is trained")  # fmt: skip
    parser.add_argument("--data", metavar="DIR", type=Path, help="folder made by --prepare; train from it")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/mini"), help="folder for the model")
    parser.add_argument("--minutes", type=float, default=26.0, help="time budget, compilation included (default 26)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="grow", help="lengths and learning rates: grow (the "
                        "default) goes from random weights to 16K tokens; long from --start to 32K")  # fmt: skip
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--start", metavar="DIR", type=Path, help="begin the schedule with this model's weights")
    before.add_argument("--resume", metavar="DIR", type=Path, help="continue from a checkpoint of an interrupted "
                        "--out, at its place in the schedule; --minutes includes the time before it")  # fmt: skip
    parser.add_argument("--workers", type=positive, default=14, help="processes that make batches (default 14)")
    add_device(parser)
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add_card_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import device_of
    from longreach.errors import InvalidInput

    if args.card:
        return run_card(args)
    device = str(device_of(args.device))
    if not (args.prepare or args.data):
        raise InvalidInput("nothing to do: give --prepare DIR or --data DIR")
    say, done = partial(print, flush=True, file=sys.stderr if args.json else sys.stdout), dict[str, Any]()
    if args.tokenizer and not args.prepare:
        raise InvalidInput("--tokenizer: the data in --data are tokens already; give it with --prepare")
    if args.prepare:
        from longreach.train.mini.prepare import prepare

        manifest = done["prepared"] = prepare(args.prepare, tokenizer=args.tokenizer, say=say)
        say(f"{manifest['tokens']} tokens, {manifest['characters']} characters, written to {args.prepare}")
    if args.data:
        from longreach.train.mini.train import train

        done["trained"] = train(args.data, args.out, minutes=args.minutes, schedule=SCHEDULES[args.schedule],
                                resume=args.resume, start=args.start, device=device, workers=args.workers,
                                seed=args.seed, say=say)  # fmt: skip
    if args.json:
        emit(done)
    return 0
