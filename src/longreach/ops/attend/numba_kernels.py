# mypy: ignore-errors
"""The Numba kernel of attend: one pass over the keys of each row and head, in chunks, with a running softmax."""

from __future__ import annotations

import numpy as np
from numba import njit

from longreach.ops.numba_dots import AHEAD, LINE, dots, row_ahead
from longreach.ops.numba_math import INLINE, KERNEL, take, to_float
from longreach.ops.numba_softmax import add_values, soften

CHUNK = 512  # keys whose logits are held at a time


@njit(**INLINE)
def _spans(start, stop, first, some, slots):
    """Slots first to first + some of the spans' slots, counted through; how many there are."""
    n = 0
    for s in range(start.shape[0]):
        length = max(stop[s] - start[s], 0)
        if first >= length:
            first -= length
            continue
        take = min(length - first, some - n)
        for i in range(take):
            slots[n + i] = start[s] + first + i
        n += take
        first = 0
        if n == some:
            break
    return n


@njit(**INLINE)
def _entries(index, weight, weighted, begin, block, low, high, first, some, slots, added):
    """Slots first to first + some of a list's that lie in [low, high), and their log-weights; how many there are."""
    n = 0
    entry, within = begin + first // block, first % block
    for _ in range(some):
        slot = np.int64(index[entry]) * block + within
        slots[n] = slot
        added[n] = weight[entry] if weighted else np.float32(0.0)
        n += 1 if low <= slot < high else 0
        within += 1
        if within == block:
            entry, within = entry + 1, 0
    return n


@njit(**INLINE)
def _in_order(index, first, last, begin, block, filled):
    """Whether entries [first, last) of the list at `begin` ascend and name slots below `filled`."""
    end = (filled + block - 1) // block
    before = np.int64(index[first - 1]) if first > begin else np.int64(-1)
    right = True
    for i in range(first, last):
        entry = np.int64(index[i])
        right &= before < entry
        right &= entry < end
        before = entry
    return right


@njit(**INLINE)
def _known(x, slots, n, first, s):
    """s[h, c] = x[slots[c], first + h]."""
    for c in range(n):
        for h in range(s.shape[0]):
            s[h, c] = x[slots[c], first + h]


@njit(**INLINE)
def _piece(w, q, memory, rows, which, softcap, known, results):
    """Work item w: piece w % parts of what unit w // parts reads."""
    k, v, k_strides, v_strides, table, paged, page = memory
    seq, filled, low, high, scale, share, mine = rows
    spans, bounds, index, weight, weighted, begin, length, block = which
    given, x = known
    top, total, out, doubt = results
    parts, width, dim = out.shape[1:]
    unit, part = w // parts, w % parts
    row, u = unit // share, unit % share
    head = u // mine
    size = LINE // k.itemsize
    lines = (dim + size - 1) // size
    slots, places = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    added, s = np.empty(CHUNK, np.float32), np.empty((width, CHUNK), np.float32)
    o, m, z = out[unit, part], top[unit, part], total[unit, part]
    o[:] = np.float32(0.0)
    m[:] = np.float32(-np.inf)
    z[:] = np.float32(0.0)
    scaled = np.empty((width, dim), np.float32)
    if not given:
        for h in range(width):
            mine_q = q[(unit * width + h) * dim : (unit * width + h + 1) * dim]
            for d in range(dim):
                scaled[h, d] = to_float(mine_q[d]) * scale
    first, last = low[row, u if low.shape[1] > 1 else 0], high[row, u if high.shape[1] > 1 else 0]
    ends = bounds[row, u if bounds.shape[1] > 1 else 0]
    start, stop = ends[0], ends[1]
    everything = not spans and length[unit] < 0
    keys = max(last - first, 0)
    if spans:
        keys = np.int64(0)
        for i in range(start.shape[0]):
            keys += max(stop[i] - start[i], 0)
    elif not everything:
        keys = length[unit] * block
    at, end = keys * part // parts, keys * (part + 1) // parts
    if not spans and not everything and at < end:
        its = begin[unit]
        if not _in_order(index, its + at // block, its + (end - 1) // block + 1, its, block, filled[row]):
            doubt[0] = 1
    opens, here = np.int64(-page), seq[row]  # the last slot's page: its first slot, and where it lies
    while at < end:
        some = min(CHUNK, end - at)
        if spans:
            n = _spans(start, stop, at, some, slots)
        elif everything:
            n = some
            for i in range(n):
                slots[i] = first + at + i
                added[i] = np.float32(0.0)
        else:
            n = _entries(index, weight, weighted, begin[unit], block, first, last, at, some, slots, added)
        at += some
        if given:
            _known(x[row, head], slots, n, u % mine, s)
        for i in range(n):
            place, slot = seq[row], slots[i]
            if paged:
                if not 0 <= slot - opens < page:
                    opens = slot // page * page
                    here = table[seq[row], slot // page]
                place, slot = here, slot - opens
            slots[i] = place * v_strides[0] + head * v_strides[1] + slot * v_strides[2]
            places[i] = place * k_strides[0] + head * k_strides[1] + slot * k_strides[2]
            if i < AHEAD:
                if given:
                    row_ahead(v, slots[i], size, lines)
                else:
                    row_ahead(k, places[i], size, lines)
        if not given:
            dots(k, places, n, scaled, s, dim, size, lines)
            for i in range(min(AHEAD, n)):  # they arrive while the weights are computed
                row_ahead(v, slots[i], size, lines)
        soften(s, n, added, weighted, softcap, m, z, o, dim)
        add_values(v, slots, n, s, o, dim, size, lines)


@njit(**KERNEL)
def attend(worker, workers, counter, q, memory, rows, which, softcap, known, results):
    """Pieces, taken from the counter.

    Unit = (row, head of the selection); each is read in pieces, which `merge` puts together.
    q: flat [units, width, D]. memory: k, v flat; their strides of (page, head, slot) in elements; table [B, pages],
    paged, page. rows: seq and its slots in use, of each row; low, high [R, 1 or heads], the slots that may be read; the
    factor of q; units a row, units a KV head. which: spans; bounds [R, 1 or heads, 2, S], start and stop of spans that
    do not overlap, cut to low and high; else index, weight, weighted, begin and length [units] of lists, -1 for
    everything; block. known: whether logits are known, and then float32 [R, G, N, group]. results, written: top, total
    [units, parts, width], out [units, parts, width, D], doubt [1]: 1 if the entries of a list do not ascend or name
    slots that are not in use, which are not read.
    """
    pieces = results[2].shape[0] * results[2].shape[1]
    w = take(counter)
    while w < pieces:
        _piece(w, q, memory, rows, which, softcap, known, results)
        w = take(counter)


@njit(**KERNEL)
def disjoint(bounds, reach):
    """Spans in place, so that they do not overlap. bounds: [R, heads, 2, S], start and stop, cut to reach [R]."""
    for row in range(bounds.shape[0]):
        for head in range(bounds.shape[1]):
            start, stop = bounds[row, head, 0], bounds[row, head, 1]
            for i in range(start.shape[0]):
                a, b = min(max(start[i], 0), reach[row]), min(max(stop[i], 0), reach[row])
                j = i
                while j > 0 and start[j - 1] > a:
                    start[j], stop[j] = start[j - 1], stop[j - 1]
                    j -= 1
                start[j], stop[j] = a, b
            for i in range(1, start.shape[0]):
                stop[i] = max(stop[i], stop[i - 1])
                start[i] = max(start[i], stop[i - 1])
