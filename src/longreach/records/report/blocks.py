"""The blocks of a report, before rendering as Markdown or HTML. Texts are plain; renderers escape them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mark = Literal["", "worse", "better"]
SIGNS: dict[Mark, str] = {"": "", "worse": "▼", "better": "▲"}


@dataclass(frozen=True)
class Heading:
    """level: 1 for the report's title, 2 for its parts."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph. loud: not to be overlooked."""

    text: str
    loud: bool = False


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, a note in small print, and a comparison with dense attention."""

    text: str
    note: str = ""
    mark: Mark = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells. texts: number of leading columns with words. folded: collapsed, if the format can do it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: int = 1
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture under a file name of its own."""

    file: str
    png: bytes
    caption: str


@dataclass(frozen=True)
class Code:
    """Text to be copied as it stands, on several lines."""

    text: str


Block = Heading | Text | Table | Figure | Code


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str | Cell]], texts: int = 1, folded: bool = False
) -> Table:
    """A table from texts and cells."""
    cells = tuple(tuple(c if isinstance(c, Cell) else Cell(c) for c in row) for row in rows)
    return Table(title, tuple(head), cells, texts, folded)
