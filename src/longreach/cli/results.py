"""Shared by verbs that measure a model: --output, --figures and --json, and what they write and print."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_chunk_size, add_graph, add_json, add_methods
from longreach.cli.show import console, emit, waiting
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.records import Journal
    from longreach.records.report.blocks import Block
    from longreach.records.report.reading import Record


def add_results(parser: argparse.ArgumentParser, *, figures: bool) -> None:
    """--prefill-chunk-size, --output, --figures if `figures`, --json."""
    add_chunk_size(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a record that `longreach report` reads")
    if figures:
        parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw pictures into a folder; earlier ones "
                            "are replaced (extra `report`)")  # fmt: skip
    add_json(parser)


def add_resumable(parser: argparse.ArgumentParser, part: str) -> None:
    """--method, --prefill-chunk-size, --output, --no-graph, --json. part: the unit that an interrupted run keeps."""
    add_methods(parser)
    add_chunk_size(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"write a record; the same command continues an "
                        f"interrupted run, {part} by {part}")  # fmt: skip
    add_graph(parser)
    add_json(parser)


def check_figures(folder: Path | None) -> None:
    """Check that pictures can be drawn and written, before anything is measured; folder: None for no pictures.

    Raises Unsupported without matplotlib, InvalidInput if the folder cannot be written.
    """
    if folder is None:
        return
    from longreach.records.report.plots import check_installed

    check_installed()
    trial = folder / ".longreach.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise InvalidInput(f"cannot write pictures to {folder}: {error.strerror}; choose another --figures") from error


def draw(record: dict[str, Any], folder: Path, blocks: Callable[[Record, str], list[Block]]) -> list[Path]:
    """Write a report's pictures of a record into a folder: their paths. blocks: the report's section of this kind."""
    from longreach.records.report.blocks import Figure
    from longreach.records.report.reading import Record
    from longreach.records.report.writing import write_all

    kind = record["kind"]
    with waiting("drawing"):
        found = blocks(Record(kind, kind, record), kind)
        return write_all(folder, {block.file: block.png for block in found if isinstance(block, Figure)})


def finish(
    args: argparse.Namespace,
    record: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    *,
    journal: Journal | None = None,
    blocks: Callable[[Record, str], list[Block]] | None = None,
) -> None:
    """Write a record (--output), draw its pictures (--figures), and print it: with --json as it is, else by `show`.

    journal: removed once the record is written. blocks: as in `draw`, for verbs with --figures.
    """
    from longreach.records import write

    if args.output is not None:
        write(args.output, record)
    if journal is not None:
        journal.remove()
    drawn = draw(record, args.figures, blocks) if blocks is not None and args.figures is not None else []
    if args.json:
        emit(record)
        return
    show(record)
    for path in drawn:
        console().print(str(path), soft_wrap=True)
