"""Numbers, tables and places as the model card writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.records.report.format import one_line


def commit(content: dict[str, Any]) -> str:
    """Where a log's or record's code was."""
    return f"{(content['commit'] or 'unknown')[:12]}{' with uncommitted changes' if content['dirty'] else ''}"


def large(count: float) -> str:
    """A number of tokens."""
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"


def whole(count: Any) -> str:
    """A count, or nothing where there is none."""
    return "" if count is None else f"{count:,}" if isinstance(count, int) else f"{count}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    cells = [[one_line(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    cells.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
