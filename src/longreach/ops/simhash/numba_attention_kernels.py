# mypy: ignore-errors
"""The Numba kernel of attend_sampled: a decode step's sampled attention, from hashing the queries to the output."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.numba_dots import AHEAD, LINE, dots, row_ahead
from longreach.ops.numba_math import INLINE, KERNEL, prefetch, take, to_float
from longreach.ops.numba_softmax import add_values, soften
from longreach.ops.simhash.numba_kernels import (
    add_inclusion,
    agreement,
    count_tables,
    list_hits,
    log,
    normalise,
    widen,
)

CHUNK = 256  # keys whose logits are held at a time


@njit(**INLINE)
def _code(q, void, directions, strides, bits, s, places, codes):
    """codes [width, tables] of queries q [width, D] float32, as `numba_kernels.encode` computes them."""
    width, dim = q.shape
    size = LINE // directions.itemsize
    lines = (dim + size - 1) // size
    tables = codes.shape[1]
    for table in range(tables):
        for b in range(bits):
            places[b] = table * strides[0] + b * strides[1]
        if table + 1 < tables:  # the next table's come while these are multiplied
            for b in range(bits):
                for line in range(lines):
                    prefetch(directions, (table + 1) * strides[0] + b * strides[1] + line * size)
        dots(directions, places, bits, q, s, dim, size, lines)
        for h in range(width):
            code = 0
            for b in range(bits):
                code |= (1 if s[h, b] > 0 else 0) << b
            codes[h, table] = np.uint16(0 if void[h] else code)


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def _dots_and_cosines(k, places, n, centre, q, unit, size, lines, squares, s, cosines):
    """s[h, c] = q[h] . k at places[c]; cosines[h, c] = unit[h] . (that key - centre), squares[c] the norm of it."""
    width, dim = q.shape
    for c in range(n):
        if c + AHEAD < n:
            row_ahead(k, places[c + AHEAD], size, lines)
        row = k[places[c] : places[c] + dim]
        h = 0
        while h + 4 <= width:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = square = np.float32(0.0)
            q0, q1, q2, q3 = q[h], q[h + 1], q[h + 2], q[h + 3]
            u0, u1, u2, u3 = unit[h], unit[h + 1], unit[h + 2], unit[h + 3]
            for d in range(dim):
                x = to_float(row[d])
                y = x - centre[d]
                square += y * y
                a0 += x * q0[d]
                a1 += x * q1[d]
                a2 += x * q2[d]
                a3 += x * q3[d]
                b0 += y * u0[d]
                b1 += y * u1[d]
                b2 += y * u2[d]
                b3 += y * u3[d]
            s[h, c], s[h + 1, c], s[h + 2, c], s[h + 3, c] = a0, a1, a2, a3
            cosines[h, c], cosines[h + 1, c], cosines[h + 2, c], cosines[h + 3, c] = b0, b1, b2, b3
            squares[c] = square
            h += 4
        while h < width:
            a = b = square = np.float32(0.0)
            one, its = q[h], unit[h]
            for d in range(dim):
                x = to_float(row[d])
                y = x - centre[d]
                square += y * y
                a += x * one[d]
                b += y * its[d]
            s[h, c], cosines[h, c], squares[c] = a, b, square
            h += 1


@njit(**INLINE)
def agreements(p, squares, n, nothing):
    """Turn n products of a key and the query's direction, p, into the probability that a bit of their codes agrees.

    squares: of the keys' lengths. nothing: the query is zero; then all codes of zeros agree.
    """
    for c in range(n):
        square = squares[c]
        usable = square > np.float32(0.0) and square < np.float32(np.inf)
        cosine = p[c] / np.float32(math.sqrt(square)) if usable else np.float32(1.0 if nothing else 0.0)
        p[c] = agreement(cosine)


@njit(**INLINE)
def _locate(slots, n, memory, b, head, k_places, v_places, lines, size):
    """Where the keys and values of slots lie; the first ones are prefetched."""
    k, _, k_strides, v_strides, table, paged, page = memory
    for c in range(n):
        place, slot = b, np.int64(slots[c])
        if paged:
            place, slot = table[b, slot // page], slot % page
        k_places[c] = place * k_strides[0] + head * k_strides[1] + slot * k_strides[2]
        v_places[c] = place * v_strides[0] + head * v_strides[1] + slot * v_strides[2]
        if c < AHEAD:
            row_ahead(k, k_places[c], size, lines)


@njit(**INLINE)
def _exactly(first, last, memory, b, head, q, softcap, top, total, out, scratch):
    """Attend to slots [first, last)."""
    slots, k_places, v_places, added, s = scratch
    dim = q.shape[1]
    k, v = memory[0], memory[1]
    size = LINE // k.itemsize
    lines = (dim + size - 1) // size
    while first < last:
        n = min(CHUNK, last - first)
        for c in range(n):
            slots[c] = first + c
        first += n
        _locate(slots, n, memory, b, head, k_places, v_places, lines, size)
        dots(k, k_places, n, q, s, dim, size, lines)
        for c in range(min(AHEAD, n)):
            row_ahead(v, v_places[c], size, lines)
        soften(s, n, added, False, softcap, top, total, out, dim)
        add_values(v, v_places, n, s, out, dim, size, lines)


@njit(**INLINE)
def _by_sample(
    index, met, weight, memory, b, head, centre, q, unit, void, law, softcap, top, total, out, scratch, sums
):
    """Attend to the sampled keys `index` with their log-weights, which are written. void: of the queries."""
    slots, k_places, v_places, added, s = scratch
    cosines, squares, u, spread, x, y, z = sums
    width, dim = q.shape
    k, v = memory[0], memory[1]
    size = LINE // k.itemsize
    lines = (dim + size - 1) // size
    first = 0
    while first < index.shape[0]:
        n = min(CHUNK, index.shape[0] - first)
        for c in range(n):
            slots[c] = index[first + c]
            u[c] = spread[c] = np.float32(0.0)
        _locate(slots, n, memory, b, head, k_places, v_places, lines, size)
        _dots_and_cosines(k, k_places, n, centre, q, unit, size, lines, squares, s, cosines)
        for c in range(min(AHEAD, n)):  # they arrive while the weights are computed
            row_ahead(v, v_places[c], size, lines)
        for h in range(width):
            p = cosines[h]
            agreements(p, squares, n, void[h])
            add_inclusion(p, n, law, x, y, z, u, spread)
        for c in range(n):
            added[c] = log(np.float32(met[first + c])) - log(u[c])
            weight[first + c] = added[c]
        first += n
        soften(s, n, added, True, softcap, top, total, out, dim)
        add_values(v, v_places, n, s, out, dim, size, lines)


@njit(**INLINE)
def _sample(
    ids, id_strides, offsets, offset_strides, size, place, lowest, stop, least, group, own, codes, index, found, used
):
    """The lists of a row's KV head, one for each query head where `own`, else one. Returns the ids read, and how many
    keys any head sampled.

    place: (sequence, KV head) in the tables. index, written: [lists, room]. found: met like index, times, hits, any.
    used, written: int64 [lists].
    """
    met, times, hits, some = found
    words, union, read = hits.view(np.uint64), 0, 0
    for i in range(used.shape[0]):
        used[i] = 0
    segments = (stop + size - 1) // size if stop > lowest else 0
    for segment in range(lowest // size, segments):
        begin = segment * size
        here = ids[place[0] * id_strides[0] + place[1] * id_strides[1] + begin :]
        edges = offsets[place[0] * offset_strides[0] + place[1] * offset_strides[1] + segment * offset_strides[3] :]
        end = min(stop - begin, size)
        for h in range(group):
            read += count_tables(here, id_strides[2], edges, offset_strides[2], codes[h], least, times, hits)
            for i in range(size):
                times[i] = 0
            if own:
                for i in range(size):
                    some[i] |= hits[i]
                used[h] = list_hits(hits, words, end, begin, index[h], met[h], used[h])
        if own:
            for i in range(size):
                union += np.int64(some[i]) if i < end else 0  # others lie past a truncation
                some[i] = 0
        else:
            used[0] = list_hits(hits, words, end, begin, index[0], met[0], used[0])
    return read, (union if own else used[0])


@njit(**KERNEL)
def attend(worker, workers, counter, q, memory, tables, directions, rows, terms, law, results):
    """Rows and KV heads, taken from the counter.

    q: flat [R, H, D]. memory: as in attend's kernel, centres float32 [sequences of the tables, G, D], slots in use [B].
    tables: ids flat, their strides of (sequence, head, table), offsets flat, their strides of (sequence, head, table,
    segment), size of a segment, HashTables.first and stop. directions: flat, strides of (table, bit), bits, tables.
    rows: seq, pos [R]; slots [B], sequences of the tables; limit [R]. terms: KV heads, `own`, slots that are always
    attended to from the first one on, least, scale, softcap. law: see `add_inclusion`.
    results, written: out [R, H, D], lse [R, H]; index int32, weight float32 [R, lists, C], count int32 [R, lists]; and
    numbers int64 [R, G, NUMBERS], see `attention`.
    """
    ids, id_strides, offsets, offset_strides, size, lowest, ends = tables
    memory, centres, filled = memory[:7], memory[7], memory[8]
    dirs, dir_strides, bits, count = directions
    seqs, positions, held, limits = rows
    heads, own, sinks, least, scale, softcap, edges = terms
    out, lse, index, weight, counts, numbers = results
    dim = out.shape[2]
    group = out.shape[1] // heads
    lists = group if own else 1
    room = index.shape[2]
    times, hits = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    met = np.empty((lists, room), np.uint8)
    found = (met, times, hits, np.zeros(size if own else 1, np.uint8))
    used, codes = np.empty(lists, np.int64), np.empty((group, count), np.uint16)
    plain, unit = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
    void, signs, places = np.empty(group, np.bool_), np.empty((group, bits), np.float32), np.empty(bits, np.int64)
    slots, k_places, v_places = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    s, cosines = np.empty((group, CHUNK), np.float32), np.empty((group, CHUNK), np.float32)
    added, squares, u = np.zeros(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    spread, x, y = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    z = np.empty(CHUNK, np.float32)
    scratch = (slots, k_places, v_places, added, s)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    item = take(counter)
    while item < seqs.shape[0] * heads:
        r, g = item // heads, item % heads
        item = take(counter)
        b, at = seqs[r], held[seqs[r]]
        reach = max(0, min(positions[r] + 1, filled[b]))
        for h in range(group):
            its = (r * heads * group + g * group + h) * dim
            void[h] = widen(q[its : its + dim], plain[h])
        _code(plain, void, dirs, dir_strides, bits, signs, places, codes)
        for h in range(group):
            for d in range(dim):
                unit[h, d] = plain[h, d]
                plain[h, d] *= scale
            normalise(unit[h], void[h])
        stop = min(np.int64(ends[at]), reach)
        read, union = _sample(
            ids, id_strides, offsets, offset_strides, size, (at, g), lowest, stop, least, group, own, codes,
            index[r, g * lists : (g + 1) * lists], found, used,
        )  # fmt: skip
        segments = (np.int64(ends[at]) + size - 1) // size - lowest // size if ends[at] > lowest else 0
        mine = numbers[r, g]
        mine[0], mine[1], mine[2], mine[5], mine[6] = union, 0, 0, 2 * read + segments * edges, ends[at]
        o = out[r, g * group : (g + 1) * group]
        o[:] = np.float32(0.0)
        top[:] = np.float32(-np.inf)
        total[:] = np.float32(0.0)
        start = max(stop, min(sinks, reach))
        _exactly(0, min(sinks, reach), memory, b, g, plain, softcap, top, total, o, scratch)
        _exactly(start, reach, memory, b, g, plain, softcap, top, total, o, scratch)
        width = group // lists
        for i in range(lists):
            n, li = used[i], g * lists + i
            counts[r, li] = n if n <= limits[r] else room + 1
            one = slice(i * width, (i + 1) * width)
            if n > limits[r]:
                mine[2] += 1
                _exactly(
                    min(sinks, reach), start, memory, b, g, plain[one], softcap, top[one], total[one], o[one],
                    (slots, k_places, v_places, added, s[one]),
                )  # fmt: skip
                continue
            for c in range(n):
                mine[1] += met[i, c]
            some = index[r, li, :n]
            _by_sample(
                some, met[i, :n], weight[r, li], memory, b, g, centres[at, g], plain[one], unit[one], void[one], law,
                softcap, top[one], total[one], o[one], (slots, k_places, v_places, added, s[one]),
                (cosines[one], squares, u, spread, x, y, z),
            )  # fmt: skip
        mine[3] = 0 if mine[2] == lists else union
        mine[4] = reach if mine[2] > 0 else union + min(sinks, reach) + reach - start
        for h in range(group):
            nothing = top[h] == np.float32(-np.inf)
            lse[r, g * group + h] = top[h] if nothing else top[h] + np.float32(math.log(total[h]))
            for d in range(dim):
                o[h, d] = np.float32(0.0) if nothing else o[h, d] / total[h]
