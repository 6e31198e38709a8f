"""Tables of a documentation page, and the records that they are compared with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from longreach.records.record import read

ROOT = Path(__file__).parent.parent
Row = tuple[str, ...]


@cache
def record(name: str) -> Any:
    """A committed record, by its file name without endings."""
    (path,) = (ROOT / "benchmarks/results").glob(f"{name}.json*")
    return read(path)


def section(page: str, first: str, before: str | None = None) -> str:
    """A page's text from a heading of the second level up to another one, or to the end."""
    start, stop = (None if title is None else page.index(f"\n## {title}\n") for title in (first, before))
    return page[start:stop]


def tables(text: str) -> Iterator[tuple[Row, list[Row]]]:
    """Head and rows of each table."""
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        head, _, *rows = map(cells, block.splitlines())
        yield head, rows


def cells(line: str) -> Row:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
