# mypy: ignore-errors
"""Products of vectors with gathered rows, for the Numba kernels of several ops."""

from __future__ import annotations

import numpy as np
from numba import njit

from longreach.ops.numba_math import INLINE, KERNEL, prefetch, to_float

AHEAD = 12  # rows that are prefetched before they are read
LINE = 64  # bytes


@njit(**INLINE)
def row_ahead(memory, place, size, lines):
    for line in range(lines):
        prefetch(memory, place + line * size)


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def _dots_of_two(k, places, n, q, s, dim, size, lines):
    """`dots` for two heads, which share a converted key."""
    q0, q1 = q[0], q[1]
    for c in range(n):
        if c + AHEAD < n:
            row_ahead(k, places[c + AHEAD], size, lines)
        row = k[places[c] : places[c] + dim]
        a0 = a1 = np.float32(0.0)
        for d in range(dim):
            x = to_float(row[d])
            a0 += x * q0[d]
            a1 += x * q1[d]
        s[0, c], s[1, c] = a0, a1


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def dots(k, places, n, q, s, dim, size, lines):
    """s[h, c] = q[h] . k at places[c]; a key is converted once for four heads, or for both of two."""
    width = q.shape[0]
    if width == 2:
        return _dots_of_two(k, places, n, q, s, dim, size, lines)
    for c in range(n):
        if c + AHEAD < n:
            row_ahead(k, places[c + AHEAD], size, lines)
        row = k[places[c] : places[c] + dim]
        h = 0
        while h + 4 <= width:
            a0 = a1 = a2 = a3 = np.float32(0.0)
            q0, q1, q2, q3 = q[h], q[h + 1], q[h + 2], q[h + 3]
            for d in range(dim):
                x = to_float(row[d])
                a0 += x * q0[d]
                a1 += x * q1[d]
                a2 += x * q2[d]
                a3 += x * q3[d]
            s[h, c], s[h + 1, c], s[h + 2, c], s[h + 3, c] = a0, a1, a2, a3
            h += 4
        while h < width:
            a = np.float32(0.0)
            one = q[h]
            for d in range(dim):
                a += to_float(row[d]) * one[d]
            s[h, c] = a
            h += 1
