# mypy: ignore-errors
"""The Numba kernel of top_k: the k-th largest score by radix select, then one pass over the columns."""

from __future__ import annotations

import numpy as np
from numba import njit

from longreach.ops.numba_math import INLINE, KERNEL

BINS = 1 << 11  # 11 bits at a time, from the highest: three rounds for 32 bits


@njit(**INLINE)
def _threshold(keys, n, take, bins, some):
    """The `take`-th largest of keys[:n], and how many of those equal to it are among the `take` largest.

    1 <= take <= n. bins, some: memory of BINS numbers and of n keys.
    """
    found = np.uint32(0)
    for shift in (21, 10, -1):
        bins[:] = 0
        if shift > 0:
            for i in range(n):
                bins[(keys[i] >> np.uint32(shift)) & np.uint32(BINS - 1)] += 1
        else:
            for i in range(n):
                bins[keys[i] & np.uint32(1023)] += 1
        b = BINS - 1
        while bins[b] < take:
            take -= bins[b]
            b -= 1
        if shift < 0:
            return found | np.uint32(b), take
        found |= np.uint32(b) << np.uint32(shift)
        m = 0
        for i in range(n):  # some may be keys: it is written behind the place that is read
            key = keys[i]
            some[m] = key
            m += ((key >> np.uint32(shift)) & np.uint32(BINS - 1)) == np.uint32(b)
        keys, n = some, m
    return found, take


@njit(**KERNEL)
def top_k(worker, workers, bits, starts, count, length, first, last, index):
    """Every `workers`-th row, from number `worker` on.

    bits: uint32 flat memory of float32 scores; starts, count, length: int64 [rows], where a row begins in it, its k
    and its length. 0 <= count <= length. index: int32 [rows, capacity]; rows with a larger count are left out.
    """
    keys, some, bins = np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(BINS, np.int64)
    for row in range(worker, len(starts), workers):
        k, n = count[row], length[row]
        if k > index.shape[1] or k == 0:
            continue
        into = index[row]
        end = n - min(last, n)  # columns from here on come first, from the end
        begin = min(first, end)  # then those before this one, from the start
        recent = min(k, n - end)
        early = min(k - recent, begin)
        take = k - recent - early
        for c in range(early):
            into[c] = c
        for c in range(recent):
            into[k - recent + c] = n - recent + c
        if take == 0:
            continue
        size = end - begin
        if take == size:
            for c in range(size):
                into[early + c] = begin + c
            continue
        if size > len(keys):
            keys, some = np.empty(size, np.uint32), np.empty(size, np.uint32)
        mine = bits[starts[row] + begin : starts[row] + end]
        for c in range(size):  # unsigned numbers in the order of the scores: NaN is the least, -0.0 is 0.0
            b = mine[c]
            b = np.uint32(0) if b == np.uint32(0x80000000) else b
            key = ~b if b & np.uint32(0x80000000) else b | np.uint32(0x80000000)
            keys[c] = np.uint32(0) if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else key
        least, equal = _threshold(keys, size, take, bins, some)
        m, stop = early, early + take
        for c in range(size):
            key = keys[c]
            into[m] = begin + c
            same = key == least
            m += (key > least) | (same & (equal > 0))  # without branches: most cannot be predicted
            equal -= same
            if m == stop:
                break
