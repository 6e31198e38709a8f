# mypy: ignore-errors
"""The Numba kernel of sampling_variance."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.numba_dots import AHEAD, LINE, dots, row_ahead
from longreach.ops.numba_math import INLINE, KERNEL, exp, to_float

CHUNK = 128  # keys whose weights are held at a time


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def _add_distances(v, places, n, x, mean, total, dim, size, lines):
    """total[h] += x[h, c] |v at places[c] - mean[h]|^2; four heads at a time."""
    width = mean.shape[0]
    for c in range(n):
        if c + AHEAD < n:
            row_ahead(v, places[c + AHEAD], size, lines)
        row = v[places[c] : places[c] + dim]
        h = 0
        while h + 4 <= width:
            a0 = a1 = a2 = a3 = np.float32(0.0)
            o0, o1, o2, o3 = mean[h], mean[h + 1], mean[h + 2], mean[h + 3]
            for d in range(dim):
                y = to_float(row[d])
                a0 += (y - o0[d]) * (y - o0[d])
                a1 += (y - o1[d]) * (y - o1[d])
                a2 += (y - o2[d]) * (y - o2[d])
                a3 += (y - o3[d]) * (y - o3[d])
            total[h] += x[h, c] * a0
            total[h + 1] += x[h + 1, c] * a1
            total[h + 2] += x[h + 2, c] * a2
            total[h + 3] += x[h + 3, c] * a3
            h += 4
        while h < width:
            a = np.float32(0.0)
            one = mean[h]
            for d in range(dim):
                y = to_float(row[d]) - one[d]
                a += y * y
            total[h] += x[h, c] * a
            h += 1


@njit(**KERNEL)
def deviations(worker, workers, q, memory, seq, reach, shape, lists, weighted, weight, means, softcap, found):
    """found[worker, unit, h]: the sum of factor W^2 |v - out|^2 over every `workers`-th chunk of each unit's list.

    q: float32 [R * units, width, D], scaled. memory: as `numba_inputs.memory_of` gives it. seq, reach: int64 [R].
    shape: units a row, units a KV head. lists: number int64 [R * units] of the list that each unit uses, index int32
    [L, C], count int64 [L], factor float32 [L, C]. weight: float32 [L, C] if weighted. means: out [R * units, width,
    D], lse [R * units, width]. softcap: 0 for none. found: zeros at first.
    """
    k, v, k_strides, v_strides, table, paged, page = memory
    number, index, count, factor = lists
    out, lse = means
    units, mine = shape
    width, dim = q.shape[1:]
    size = LINE // k.itemsize
    lines = (dim + size - 1) // size
    k_places, v_places, used = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    x = np.empty((width, CHUNK), np.float32)
    for item in range(q.shape[0]):
        row, head, at = item // units, item % units // mine, number[item]
        b, entries, n = seq[row], index[at], count[at]
        if n > entries.shape[0]:
            continue
        for first in range(worker * CHUNK, n, workers * CHUNK):
            some = 0
            for c in range(first, min(first + CHUNK, n)):
                slot, place = np.int64(entries[c]), b
                if not 0 <= slot < reach[row]:
                    continue
                if paged:
                    place, slot = table[b, slot // page], slot % page
                k_places[some] = place * k_strides[0] + head * k_strides[1] + slot * k_strides[2]
                v_places[some] = place * v_strides[0] + head * v_strides[1] + slot * v_strides[2]
                used[some] = c
                some += 1
            dots(k, k_places, some, q[item], x, dim, size, lines)
            for h in range(width):
                logit, whole = x[h], lse[item, h]
                for c in range(some):
                    y = logit[c]
                    if softcap > 0.0:
                        y = np.float32(softcap * math.tanh(y / softcap))
                    if weighted:
                        y += weight[at, used[c]]
                    w = exp(min(y - whole, np.float32(44.0))) if whole != np.float32(-np.inf) else np.float32(0.0)
                    logit[c] = factor[at, used[c]] * w * w
            _add_distances(v, v_places, some, x, out[item], found[worker, item], dim, size, lines)
