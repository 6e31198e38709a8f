"""`longreach train mini --card`: the model card, from a model directory, training logs and records."""

from __future__ import annotations

import argparse
from pathlib import Path

from longreach.errors import InvalidInput

EXAMPLE = "longreach train mini --card --model runs/mini --logs runs/mini/train.json --records ruler-4096.json"


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    """--card, --model, --logs, --records."""
    parser.add_argument("--card", action="store_true", help="write README.md and loss.png of --model")
    parser.add_argument("--model", metavar="DIR", type=Path, help="the model that --card describes")
    parser.add_argument("--logs", metavar="FILE", type=Path, nargs="+", default=[],
                        help="train.json of each run that led to --model, in order")  # fmt: skip
    parser.add_argument("--records", metavar="FILE", type=Path, nargs="+", default=[],
                        help="records of longreach eval on --model (--output)")  # fmt: skip


def run_card(args: argparse.Namespace) -> int:
    """Write the card that the arguments ask for."""
    needed = {"--model DIR": args.model, "--logs FILE ...": args.logs, "--records FILE ...": args.records}
    missing = [option for option, value in needed.items() if not value]
    if missing:
        raise InvalidInput(f"--card needs {', '.join(needed)}; give {' and '.join(missing)} too")
    from longreach.train.mini import card

    card.write(args.model, args.logs, args.records)
    print(f"written: {args.model / 'README.md'}, {args.model / 'loss.png'}")
    return 0
