"""Reports of records: Markdown, one HTML page, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["report"]


def report(paths: Sequence[Path], folder: Path) -> tuple[list[Path], list[str]]:
    """Write report.md, report.html and the pictures of some records into a folder: (files, warnings to heed).

    Raises InvalidInput where a record cannot be read or the folder not be written, Unsupported without matplotlib;
    then nothing is written.
    """
    from longreach.records.report.blocks import Figure
    from longreach.records.report.build import build
    from longreach.records.report.header import warnings
    from longreach.records.report.html import html
    from longreach.records.report.markdown import markdown
    from longreach.records.report.plots import check_installed
    from longreach.records.report.reading import load_all
    from longreach.records.report.writing import write_all

    records = load_all(paths)
    check_installed()
    blocks = build(records)
    files = {"report.html": html(blocks).encode(), "report.md": markdown(blocks).encode()}
    files |= {block.file: block.png for block in blocks if isinstance(block, Figure)}
    return write_all(folder, files), list(warnings(records))
