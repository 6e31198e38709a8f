"""`longreach report`: records as Markdown, pictures and one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from longreach.cli.common import add_json
from longreach.cli.show import console, emit, waiting

NAME = "report"
HELP = "turn records of eval, perplexity, compare, attention, fusion, sampling and mka routing into tables and pictures"
EXAMPLES = (
    "longreach report tasks.json --output report",
    "longreach report sweep.json perplexity.json --output report --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD.json",
                        help="records of eval, perplexity, compare, attention, fusion, sampling and mka "
                        "routing, for one report")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder for report.html, "
                        "report.md and pictures; earlier ones are replaced, other files stay")  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from longreach.records.report import report

    with waiting("drawing"):
        written, warnings = report(args.records, args.output)
    if args.json:
        emit({"written": [str(path) for path in written], "warnings": warnings})
        return 0
    out = console()
    for warning in warnings:
        out.print(f"mind: {_line(warning)}", soft_wrap=True)
    for path in written:
        out.print(_line(str(path)), soft_wrap=True)
    return 0


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
