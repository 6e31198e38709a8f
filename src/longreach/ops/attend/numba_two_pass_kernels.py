# mypy: ignore-errors
"""The Numba kernel of passes that keep logits: all keys that a row reaches, in chunks, with a running softmax."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.attend.numba_kernels import CHUNK
from longreach.ops.numba_dots import LINE, dots
from longreach.ops.numba_math import INLINE, KERNEL, take
from longreach.ops.numba_softmax import add_values, soften


@njit(**INLINE)
def _piece(w, q, memory, rows, softcap, values, kept, results):
    """Work item w: piece w % parts of the keys of unit w // parts."""
    k, v, k_strides, v_strides, table, paged, page = memory
    seq, reach = rows
    top, total, out = results
    parts, width = top.shape[1:]
    heads, dim, wide = kept.shape[1], q.shape[2], out.shape[3]
    unit, part = w // parts, w % parts
    row, head = unit // heads, unit % heads
    limit, size = reach[row], LINE // k.itemsize
    lines = (dim + size - 1) // size
    places, places_v = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    added, s = np.empty(1, np.float32), np.empty((width, CHUNK), np.float32)
    o, m, z = out[unit, part], top[unit, part], total[unit, part]
    o[:] = np.float32(0.0)
    m[:] = np.float32(-np.inf)
    z[:] = np.float32(0.0)
    mine = kept[row, head]
    at, end = limit * part // parts, limit * (part + 1) // parts
    while at < end:
        some = min(CHUNK, end - at)
        n = 0
        while n < some:  # slots of one page
            place, slot, run = seq[row], at + n, some - n
            if paged:
                place, slot = table[seq[row], (at + n) // page], (at + n) % page
                run = min(run, page - slot)
            for i in range(run):
                places[n + i] = place * k_strides[0] + head * k_strides[1] + (slot + i) * k_strides[2]
                places_v[n + i] = place * v_strides[0] + head * v_strides[1] + (slot + i) * v_strides[2]
            n += run
        dots(k, places, n, q[unit], s, dim, size, lines)
        for h in range(width):
            one = s[h]
            if softcap > 0.0:
                for c in range(n):
                    one[c] = softcap * np.float32(math.tanh(one[c] / softcap))
            for c in range(n):
                mine[at + c, h] = one[c]
        soften(s, n, added, False, np.float32(0.0), m, z, o, wide)
        if values:
            add_values(v, places_v, n, s, o, dim, size, lines)
        at += some


@njit(**KERNEL)
def score(worker, workers, counter, q, memory, rows, softcap, values, kept, results):
    """Pieces, taken from the counter, as in the kernel of attend.

    Unit = (row, KV head). q: float32 [units, group, D], scaled. memory: as in attend. rows: seq, reach of each.
    values: whether values are read. Written: kept [R, G, N, group] below a row's reach; results: top, total
    [units, parts, group], out [units, parts, group, D], or [..., 0] where values are not read.
    """
    pieces = results[0].shape[0] * results[0].shape[1]
    w = take(counter)
    while w < pieces:
        _piece(w, q, memory, rows, softcap, values, kept, results)
        w = take(counter)
