"""`longreach train mini`: prepare the corpus, train longreach-mini."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from longreach.cli.common import add_device, positive

NAME = "train"
HELP = "prepare the data of the model that longreach ships, and train it"
EXAMPLES = (
    "longreach train mini --prepare runs/mini-data",
    "longreach train mini --data runs/mini-data --out runs/mini --minutes 23",
    "longreach train mini --data runs/mini-data --out runs/more --resume runs/mini --minutes 46",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", choices=["mini"], help="which recipe")
    parser.add_argument("--prepare", metavar="DIR", type=Path, help="build corpus, haystack and tokenizer into DIR")
    parser.add_argument("--data", metavar="DIR", type=Path, help="what --prepare built; trains from it")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/mini"), help="where the model goes")
    parser.add_argument("--minutes", type=float, default=23.0, help="time budget, compilation included (default 23)")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="go on from a checkpoint of --out, at its place in "
                        "the schedule; --minutes counts its own (weights only: the optimiser starts anew)")  # fmt: skip
    parser.add_argument("--workers", type=positive, default=14, help="processes that make batches (default 14)")
    add_device(parser)
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import device_of
    from longreach.errors import InvalidInput

    device = str(device_of(args.device))
    if not (args.prepare or args.data):
        raise InvalidInput("nothing to do: give --prepare DIR or --data DIR")
    if args.prepare:
        from longreach.train.mini.prepare import prepare

        manifest = prepare(args.prepare)
        print(f"{manifest['tokens']} tokens, {manifest['characters']} characters, written to {args.prepare}")
    if args.data:
        from longreach.train.mini.train import train

        train(args.data, args.out, minutes=args.minutes, resume=args.resume, device=device, workers=args.workers,
              seed=args.seed, say=partial(print, flush=True))  # fmt: skip
    return 0
