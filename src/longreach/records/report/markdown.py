"""A report as Markdown, with pictures in separate files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from longreach.records.report.blocks import SIGNS, Block, Cell, Code, Figure, Heading, Table, Text
from longreach.records.report.format import one_line

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}  # a backslash before | is no escape everywhere
SPECIAL = re.compile(r"([\\`*\[\]~$#])|([&<>|])|((?<![^\W_])_|_(?![^\W_]))|(:)(?=//)|(?<=www)(\.)", re.IGNORECASE)
START = re.compile(r"^([-+=]|\d+(?=[.)]))")  # lists and underlines, where a line begins


def markdown(blocks: Sequence[Block]) -> str:
    """The whole document."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def escaped(text: str) -> str:
    """Text, escaped so that it contains no markup, links, table cells or formulas."""
    return SPECIAL.sub(lambda found: ENTITIES.get(found[0]) or f"\\{found[0]}", one_line(text)).strip()


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {escaped(text)}"
        case Text(text, loud):
            plain = START.sub(_at_start, escaped(text))
            return f"> **{plain}**" if loud else plain
        case Figure(file, _, caption):
            return f"![{escaped(caption)}]({file})\n\n{escaped(caption)}"
        case Code(text):
            text = "\n".join(map(one_line, text.split("\n")))
            runs = [len(run) for run in re.findall("`+", text)]
            fence = "`" * max(3, *(n + 1 for n in runs), 3)
            return f"{fence}\n{text}\n{fence}"
        case Table():
            return _table(block)


def _table(block: Table) -> str:
    align = ["---" if n < block.texts else "---:" for n in range(len(block.head))]
    lines = [_row(block.head), _row(align)] + [_row([_cell(c) for c in row]) for row in block.rows]
    lines[0] = _row([escaped(text) for text in block.head])
    return "\n".join([f"**{escaped(block.title)}**", "", *lines] if block.title else lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    note = f" ({escaped(cell.note)})" if cell.note else ""
    sign = f" {SIGNS[cell.mark]}" if cell.mark else ""
    return f"{escaped(cell.text)}{note}{sign}"


def _at_start(found: re.Match[str]) -> str:
    # a number keeps its value, the dot or parenthesis after it cannot begin a list
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"
