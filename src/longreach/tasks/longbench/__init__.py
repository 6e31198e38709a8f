"""LongBench and LongBench v2 from their official local files, with their measures."""

from __future__ import annotations

from pathlib import Path

from longreach.tasks.longbench import v1, v2
from longreach.tasks.longbench.base import Fixed


def tasks(path: Path, version: int = 1) -> list[Fixed]:
    """The tasks in a data file: of version 1 one for each data set, also of a folder of files; of version 2 one.

    Raises InvalidInput, naming file, line and field, for what is not the official file, Unsupported where a package
    that a measure needs is not installed.
    """
    readers = {1: v1.read, 2: v2.read}
    return readers[version](path)
