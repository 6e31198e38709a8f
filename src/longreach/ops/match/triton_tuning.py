"""How the kernels of nearest are launched."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.ops.match.triton_kernels import INTERPRETED as _INTERPRETED

INTERPRETED: bool = _INTERPRETED.value
SHARED = 128 * 1024  # bytes of shared memory that a program's stages take, at most
FEW, SOME = 128, 256  # rings: up to so many one, and two programs a multiprocessor of an H200; see docs/performance.md


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
    if rings > SOME:
        block, pieces, stages = max(16, min(64, 16384 // vector)), 2, 4
    else:  # 8 KB a block
        block, pieces, stages = max(16, min(32, 8192 // vector)), max(1, FEW // rings), 8 if rings <= FEW else 5
    blocks = -(-window // block)
    if pieces >= blocks:  # each program has one block, all loads are under way at once
        return Tuning(block, blocks, 4, 1)
    return Tuning(block, pieces, 4, min(stages, SHARED // (block * vector)))  # each streams through its share
