"""Sources of a task's texts, so that a record names the file."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


def of_file(source: str, path: Path, what: str = "") -> str:
    """A source with the file that was read: the beginning of its hash, and its name. what: what the file is."""
    stat = path.stat()
    return f"{source}; sha256 {_sha256(path, stat.st_mtime_ns, stat.st_size)[:16]}, {what}{path.name}"


@cache
def _sha256(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
