"""`longreach train mini`: prepare the corpus, train longreach-mini, evaluate it."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

NAME = "train"
HELP = "train and evaluate the model that longreach ships"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("recipe", choices=["mini"], help="which recipe")
    parser.add_argument("--prepare", metavar="DIR", type=Path, help="build corpus, haystack and tokenizer into DIR")
    parser.add_argument("--data", metavar="DIR", type=Path, help="what --prepare built; trains from it")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/mini"), help="where the model goes")
    parser.add_argument("--minutes", type=float, default=15.0, help="time budget, compilation included")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="start from this checkpoint's weights")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say."""
    if args.prepare:
        from longreach.train.mini.prepare import prepare

        manifest = prepare(args.prepare)
        print(f"{manifest['tokens']} tokens, {manifest['characters']} characters, written to {args.prepare}")
    if args.data:
        from longreach.train.mini.train import train

        train(
            args.data,
            args.out,
            minutes=args.minutes,
            resume=args.resume,
            device=args.device,
            workers=args.workers,
            seed=args.seed,
            say=partial(print, flush=True),
        )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
