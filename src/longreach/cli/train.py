"""`longreach train mini`: prepare the corpus, train longreach-mini, evaluate it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from longreach.cli.common import add_device, add_json, positive
from longreach.cli.show import emit, percent, progress

NAME = "train"
HELP = "prepare, train and evaluate the model that longreach ships"
EXAMPLES = (
    "longreach train mini --prepare runs/mini-data",
    "longreach train mini --data runs/mini-data --out runs/mini --minutes 23",
    "longreach train mini --evaluate --model runs/mini --output runs/needle.json",
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
    parser.add_argument("--evaluate", action="store_true", help="ask single-needle questions in the shipped haystack")
    parser.add_argument("--model", default="mini", metavar="DIR|mini", help="what to evaluate (default mini)")
    parser.add_argument("--samples", type=positive, default=200, help="questions to ask (default 200)")
    parser.add_argument("--length", type=positive, default=4096, help="tokens of prompt and answer (default 4096)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the evaluation's record here")
    add_device(parser)
    parser.add_argument("--seed", type=int, default=0, help="of training or evaluation (default 0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.adapters.transformers import device_of
    from longreach.errors import InvalidInput

    device = str(device_of(args.device))
    if not (args.prepare or args.data or args.evaluate):
        raise InvalidInput("nothing to do: give --prepare DIR, --data DIR or --evaluate")
    if args.prepare:
        from longreach.train.mini.prepare import prepare

        manifest = prepare(args.prepare)
        print(f"{manifest['tokens']} tokens, {manifest['characters']} characters, written to {args.prepare}")
    if args.data:
        from longreach.train.mini.train import train

        train(args.data, args.out, minutes=args.minutes, resume=args.resume, device=device, workers=args.workers,
              seed=args.seed, say=partial(print, flush=True))  # fmt: skip
    if args.evaluate:
        from longreach.records import check_writable, write
        from longreach.train.mini.evaluate import evaluate

        if args.output:
            check_writable(args.output)
        with progress("asking", args.samples) as advance:
            record = evaluate(args.model, samples=args.samples, length=args.length, seed=args.seed, device=device,
                              progress=advance)  # fmt: skip
        if args.output:
            write(args.output, record)
        if args.json:
            emit(record)
        else:
            low, high = record["interval_95"]
            print(
                f"{record['right']} of {args.samples} right ({percent(record['accuracy'])}, 95% interval "
                f"{percent(low)} to {percent(high)}); without the needle {record['control_right']}"
            )
    return 0
