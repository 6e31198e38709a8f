"""How Triton's kernels split a row's columns among programs, and the memory that this takes."""

from __future__ import annotations

SHORT = 8192  # columns that one program draws from without scratch memory
PROGRAMS = 384  # of all rows: about three on each multiprocessor, as many as it has registers for
MOST_PARTS = 128  # of a row: each program reads the numbers of all of them
LEAST = 1024  # columns of a part
THRESHOLDS = 8  # tried in a pass over the columns


def parts_of(rows: int, columns: int) -> int:
    """Parts of each row's columns."""
    return max(1, min(MOST_PARTS, PROGRAMS // max(1, rows), -(-columns // LEAST)))


def workspace_bytes(rows: int, columns: int) -> int:
    """Bytes that Triton's kernels of `sample` allocate in addition to their results. rows: of all lists and heads."""
    if columns <= SHORT:
        return 0
    return rows * (parts_of(rows, columns) * (8 + 24 * THRESHOLDS) + 8 + 16 * (THRESHOLDS + 3))
