# mypy: ignore-errors
"""The Numba kernels of across_heads."""

from __future__ import annotations

import numpy as np
from numba import njit

from longreach.ops.numba_math import INLINE, KERNEL, bits_of


@njit(**KERNEL)
def largest_log_prob(worker, workers, x, lse, reach, found):
    """found[r, n] = max over g and h of x[r, g, n * group + h] - lse[r, g, h] for n < reach[r], by ranges of slots.

    x: float32 [R, G, N * group]. lse: float32 [R, G, group]. reach: int64 [R]. found: float32 [R, N].
    """
    rows, heads, group = lse.shape
    slots = found.shape[1]
    first, end = slots * worker // workers, slots * (worker + 1) // workers
    for row in range(rows):
        stop = min(end, reach[row])
        for i in range(heads * group):
            mine, base = x[row, i // group], lse[row, i // group, i % group]
            for n in range(first, stop):
                one, most = mine[n * group + i % group] - base, found[row, n]
                found[row, n] = one if i == 0 or one > most or one != one else most  # NaN stays


@njit(**KERNEL)
def spread_logits(worker, workers, x, early, late, reach, logits, scores):
    """logits[r, h, n] = x[r, g, n * group + h], -inf in [0, early) and from late[r] on, for n < reach[r]; see `Ballot`.

    x: float32 [R, G, N * group]. late, reach: int64 [R]. logits: float32 [R, H, N]. scores: float32 [R, N].
    """
    rows, heads, slots = logits.shape
    group = heads // x.shape[1]
    none = np.float32(-np.inf)
    for item in range(worker, rows * heads, workers):
        row, h = item // heads, item % heads
        mine, into, stop = x[row, h // group], logits[row, h], min(slots, reach[row])
        for n in range(stop):
            into[n] = mine[n * group + h % group]
        for n in range(min(early, stop)):
            into[n] = none
        for n in range(max(late[row], 0), stop):
            into[n] = none
        if h == 0:
            for n in range(stop):
                scores[row, n] = np.float32(1.0) if n < early else none
            for n in range(max(late[row], 0), stop):
                scores[row, n] = np.float32(2.0)


@njit(**INLINE)
def _order(x):
    """uint32 that ascends as float32 descends: NaN comes first, 0.0 equals -0.0."""
    if x != x:
        return np.uint32(0)
    b = np.uint32(bits_of(x))
    b = np.uint32(0) if b == np.uint32(0x80000000) else b
    return b if b & np.uint32(0x80000000) else ~b & np.uint32(0x7FFFFFFF)


@njit(**KERNEL)
def rank(logits, index, used, first_head, heads, scores):
    """scores[r, n] = max(scores[r, n], -turn) for each key n that a head names; see `rank_round_robin`.

    logits: float32 [R, H, N]. index: int32 [R, H, C], ascending. used: int32 [R, H]. scores: float32 [R, N].
    """
    rows, mine, room = index.shape
    keys = np.empty(room, np.uint64)
    for row in range(rows):
        for h in range(mine):
            n = used[row, h]
            if n > room:
                n = room
            for c in range(n):
                keys[c] = (np.uint64(_order(logits[row, h, index[row, h, c]])) << np.uint64(32)) | np.uint64(c)
            keys[:n].sort()
            for place in range(n):
                slot = index[row, h, np.int64(keys[place] & np.uint64(0xFFFFFFFF))]
                turn = np.float32(-(place * heads + first_head + h))
                scores[row, slot] = max(scores[row, slot], turn)
