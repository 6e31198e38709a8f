"""How the kernels of nearest are launched."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.ops.nearest.triton_kernels import INTERPRETED as _INTERPRETED

INTERPRETED: bool = _INTERPRETED.value
PROGRAMS = 512  # of four warps each, that an H200's 132 multiprocessors hold at once with room for their loads


@dataclass(frozen=True)
class Tuning:
    """block: rows of the ring that a program holds at a time; pieces: programs for one ring, at most.

    joined: the last program to be done puts the pieces together, else a second kernel does; chained: by programmatic
    dependent launch.
    """

    block: int
    pieces: int
    warps: int
    stages: int
    joined: bool = True
    chained: bool = not INTERPRETED


def tuning(rings: int, window: int, vector: int) -> Tuning:
    """The launch for `rings` (rows x heads), `window` queries of each, of `vector` bytes (a power of two)."""
    if INTERPRETED:
        return Tuning(16, 3, 1, 1)
    block = max(16, min(64, 16384 // vector))  # 16 KB a block: a hundred bytes in flight for each thread
    blocks = -(-window // block)
    pieces = max(min(2, blocks), min(blocks, -(-PROGRAMS // rings)))
    if pieces == blocks:  # few rings: each program has one block, all loads are under way at once
        return Tuning(block, pieces, 4, 1)
    return Tuning(block, pieces, 4, 4)  # many: each streams through its share, and latency counts less
