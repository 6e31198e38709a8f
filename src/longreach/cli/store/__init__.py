"""`longreach store`: chunks of documents, computed once and kept: add, list, verify, gc."""

from __future__ import annotations

import argparse

from longreach.cli.common import add_command
from longreach.cli.store import add, upkeep

NAME = "store"
HELP = "keep the keys and values of documents, computed once, on disk"
EXAMPLES = (
    "longreach store add --store chunks --model mini notes.txt report.txt",
    "longreach store add --store chunks --model ./Llama-3.1-8B-Instruct --prefix-file system.txt a.txt b.txt",
    "longreach store add --store chunks --model ./Llama-3.1-8B-Instruct --system system.txt --dependence a.txt b.txt",
    "longreach store list --store chunks --json",
    "longreach store verify --store chunks    (exit code 1 where a file was broken or unreadable)",
    "longreach store gc --store chunks --max-bytes 100GB",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for module, name, help_text in (
        (add, "add", "cut documents into chunks and store their keys and values"),
        (upkeep, "list", "show what is stored"),
        (upkeep, "verify", "read every chunk and compare all checksums; broken and foreign files are set aside, "
                           "foreign folders are only reported"),
        (upkeep, "gc", "remove what dead processes left, broken chunks set aside, and the longest unused ones"),
    ):  # fmt: skip
        action = add_command(actions, name, help_text)
        action.add_argument("--store", required=True, metavar="DIR|URL", help="a folder, or a URL (s3, gs, az, ...)")
        module.add_arguments(action, name)


def run(args: argparse.Namespace) -> int:
    return add.run(args) if args.action == "add" else upkeep.run(args)
