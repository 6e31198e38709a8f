# mypy: ignore-errors
"""The Numba kernels of block_bounds."""

from __future__ import annotations

import numpy as np
from numba import njit

from longreach.ops.numba_math import INLINE, KERNEL, to_float


@njit(**INLINE)
def _place(table, paged, page, seq, block, per):
    """Page of memory and unit in it of a block."""
    if not paged:
        return seq, block
    number = block * per // page
    return table[seq, number], block - (number * page + per - 1) // per


@njit(**KERNEL)
def bound(worker, workers, keys, bounds, filled, seq, block, per):
    """Every `workers`-th pair of a named block and a head, from number `worker` on.

    keys: k flat, its strides of (page, head, slot) in elements, table, paged, page, heads, D. bounds: low, high flat,
    their strides of (page, head, unit). filled: slots in use of each sequence. seq, block: int64 [n].
    """
    k, strides, table, paged, page, heads, dim = keys
    low, high, low_strides, high_strides = bounds
    least, largest = np.empty(dim, k.dtype), np.empty(dim, k.dtype)
    for w in range(worker, len(seq) * heads, workers):
        n, head = w // heads, w % heads
        mine, first = seq[n], block[n] * per
        end = min(first + per, filled[mine])
        if block[n] < 0 or first >= end:
            continue
        for slot in range(first, end):
            place, offset = mine, slot
            if paged:
                place, offset = table[mine, slot // page], slot % page
            at = place * strides[0] + head * strides[1] + offset * strides[2]
            row = k[at : at + dim]
            if slot == first:
                least[:] = row
                largest[:] = row
            for d in range(dim):
                x = to_float(row[d])
                least[d] = row[d] if x < to_float(least[d]) else least[d]
                largest[d] = row[d] if x > to_float(largest[d]) else largest[d]
        place, unit = _place(table, paged, page, mine, block[n], per)
        at = place * low_strides[0] + head * low_strides[1] + unit * low_strides[2]
        low[at : at + dim] = least
        at = place * high_strides[0] + head * high_strides[1] + unit * high_strides[2]
        high[at : at + dim] = largest


@njit(**KERNEL)
def score(worker, workers, q, keys, bounds, seq, newest, per, scores):
    """Every `workers`-th pair of a row and a head, from number `worker` on.

    q: float32 [R, G, group, D]. keys, bounds: as in `bound`. newest: int64 [R], each row's newest block, which is not
    scored, nor what lies behind it. scores: float32 [R, G, blocks], written.
    """
    _, _, table, paged, page, heads, dim = keys
    low, high, low_strides, high_strides = bounds
    up, down = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for w in range(worker, len(seq) * heads, workers):
        row, head = w // heads, w % heads
        up[:] = np.float32(0.0)
        down[:] = np.float32(0.0)
        for h in range(q.shape[2]):
            one = q[row, head, h]
            for d in range(dim):
                up[d] += max(one[d], np.float32(0.0))
                down[d] += min(one[d], np.float32(0.0))
        for block in range(newest[row]):
            place, unit = _place(table, paged, page, seq[row], block, per)
            at = place * low_strides[0] + head * low_strides[1] + unit * low_strides[2]
            least = low[at : at + dim]
            at = place * high_strides[0] + head * high_strides[1] + unit * high_strides[2]
            largest = high[at : at + dim]
            total = np.float32(0.0)
            for d in range(dim):
                total += to_float(largest[d]) * up[d] + to_float(least[d]) * down[d]
            scores[row, head, block] = total
