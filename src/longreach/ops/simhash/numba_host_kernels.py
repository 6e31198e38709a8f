# mypy: ignore-errors
"""Attention to sampled keys as a program that CUDA calls: see `numba_host`. The sample is found before, on the GPU."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from longreach.ops.numba_host import FAILED, FIELDS, FINISH, PIECES, WRONG_ENTRIES, array_at, counter_of, fail, float_at
from longreach.ops.numba_host import job_at as fields_at
from longreach.ops.numba_math import take
from longreach.ops.numba_softmax import merge
from longreach.ops.simhash.numba_attention_kernels import CHUNK, _by_sample, _exactly
from longreach.ops.simhash.numba_kernels import normalise, widen

# Fields of a job, behind those of every job. Addresses: q of the keys' dtype [R, H, D]; k, v; table int64 [B, pages];
# seq, pos int64 [R]; in_use int64 [B]; held int64 [B], the sequence of each in the tables; limit int64 [R]; ends int32
# [sequences of the tables]; centre float32 [sequences of the tables, G, D]; index int32, met uint8 [R, lists, C];
# count, looked_up int32 [R, lists]; out float32 [R, H, D], lse float32 [R, H], numbers int64 [R, G, NUMBERS]; work. Numbers: rows; heads (KV heads), lists (of a KV head), group; dim; strides;
# pages, page; sequences, held_sequences; room; sinks; parts; edges: bytes of a segment's look-ups; lowest, size: of the
# tables; scale, softcap as float64. own: whether each query head has a list. law: the address of (bits, tables, least,
# coefficients' and binomials' numbers) int64 [5]; constants: of (split, scale, floor) and both, float32.
NAMES = (
    "q", "k", "v", "table", "seq", "pos", "in_use", "held", "limit", "ends", "centre", "index", "met", "count",
    "looked_up", "out", "lse", "numbers", "work", "rows", "heads", "lists", "group", "dim", "k_size", "k0",
    "k1", "k2", "v0", "v1", "v2", "pages", "page", "sequences", "held_sequences", "room", "sinks", "parts", "edges",
    "lowest", "size", "scale", "softcap", "paged", "law", "constants",
)  # fmt: skip
(
    Q, K, V, TABLE, SEQ, POS, IN_USE, HELD, LIMIT, ENDS, CENTRE, INDEX, MET, COUNT, LOOKED_UP, OUT, LSE, NUMBERS, WORK, ROWS, HEADS, LISTS, GROUP, DIM, K_SIZE, K0, K1, K2, V0, V1, V2, PAGES, PAGE, SEQUENCES, HELD_SEQUENCES, ROOM,
    SINKS, PARTS, EDGES, LOWEST, SIZE, SCALE, SOFTCAP, PAGED, LAW, CONSTANTS,
) = range(FIELDS, FIELDS + len(NAMES))  # fmt: skip
LENGTH = FIELDS + len(NAMES)


def work_bytes(items: int, width: int, dim: int, parts: int) -> int:
    """Bytes of a job's own memory. items: lists of all rows."""
    return 4 * items * parts * width * (dim + 2)


@njit
def _results(job):
    """top, total [lists, parts, width] and out of the pieces. Lists are those of all rows."""
    items, parts, dim = job[ROWS] * job[HEADS] * job[LISTS], job[PARTS], job[DIM]
    width, at = job[GROUP] // job[LISTS], job[WORK]
    top = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    total = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    return top, total, array_at(at, (items, parts, width, dim), np.float32)


@njit
def _ends(job, row):
    """What a row sees: its sequence, that in the tables, the slots that it reaches, and the end of the tables."""
    b = array_at(job[SEQ], (job[ROWS],), np.int64)[row]
    pos = array_at(job[POS], (job[ROWS],), np.int64)[row]
    filled = array_at(job[IN_USE], (job[SEQUENCES],), np.int64)[b]
    at = array_at(job[HELD], (job[SEQUENCES],), np.int64)[b]
    end = np.int64(array_at(job[ENDS], (job[HELD_SEQUENCES],), np.int32)[at])
    return b, at, max(0, min(pos + 1, filled)), end


@njit
def _attend(address, job, k, v, q, law):
    """Pieces of lists, and of the slots that are always attended to, taken from the counter."""
    top, total, out = _results(job)
    rows, heads, lists, group, dim, room = job[ROWS], job[HEADS], job[LISTS], job[GROUP], job[DIM], job[ROOM]
    width, parts, sinks = group // lists, job[PARTS], job[SINKS]
    table = array_at(job[TABLE], (job[SEQUENCES], job[PAGES]), np.int64)
    memory = (k, v, (job[K0], job[K1], job[K2]), (job[V0], job[V1], job[V2]), table, job[PAGED] != 0, job[PAGE])
    centres = array_at(job[CENTRE], (job[HELD_SEQUENCES], heads, dim), np.float32)
    index = array_at(job[INDEX], (rows, heads * lists, room), np.int32)
    met = array_at(job[MET], (rows, heads * lists, room), np.uint8)
    count = array_at(job[COUNT], (rows, heads * lists), np.int32)
    limit = array_at(job[LIMIT], (rows,), np.int64)
    scale, softcap = np.float32(float_at(job[SCALE])), float_at(job[SOFTCAP])
    plain, unit = np.empty((width, dim), np.float32), np.empty((width, dim), np.float32)
    void = np.empty(width, np.bool_)
    s, cosines = np.empty((width, CHUNK), np.float32), np.empty((width, CHUNK), np.float32)
    slots, k_places, v_places = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    added, squares, u = np.zeros(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    spread, x, y = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    z, weight = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    scratch, sums = (slots, k_places, v_places, added, s), (cosines, squares, u, spread, x, y, z)
    counter, pieces = counter_of(address), rows * heads * lists * parts
    w = take(counter)
    while w < pieces:
        item, part = w // parts, w % parts
        w = take(counter)
        r, li = item // (heads * lists), item % (heads * lists)
        g = li // lists
        b, at, reach, end = _ends(job, r)
        first = (r * heads * group + li * width) * dim
        for h in range(width):
            void[h] = widen(q[first + h * dim : first + (h + 1) * dim], plain[h])
            for d in range(dim):
                unit[h, d] = plain[h, d]
                plain[h, d] *= scale
            normalise(unit[h], void[h])
        m, t, o = top[item, part], total[item, part], out[item, part]
        m[:] = np.float32(-np.inf)
        t[:] = np.float32(0.0)
        o[:] = np.float32(0.0)
        before = min(sinks, reach)
        start = max(min(end, reach), before)
        n = np.int64(count[r, li])
        if n > limit[r] or n > room:
            low, high = reach * part // parts, reach * (part + 1) // parts
            _exactly(low, high, memory, b, g, plain, softcap, m, t, o, scratch)
            continue
        always = before + reach - start  # counted through: the sinks, then those from the end of the tables on
        low, high = always * part // parts, always * (part + 1) // parts
        _exactly(low, min(high, before), memory, b, g, plain, softcap, m, t, o, scratch)
        low, high = max(low, before) - before + start, high - before + start
        _exactly(low, high, memory, b, g, plain, softcap, m, t, o, scratch)
        low, high = n * part // parts, n * (part + 1) // parts
        some = index[r, li, low:high]
        if high > low and (some[0] < 0 or some[high - low - 1] >= reach):
            fail(address, WRONG_ENTRIES)
            continue
        if high - low > weight.shape[0]:
            weight = np.empty(2 * (high - low), np.float32)
        _by_sample(
            some, met[r, li, low:high], weight, memory, b, g, centres[at, g], plain, unit, void, law, softcap, m, t, o,
            scratch, sums,
        )  # fmt: skip


@njit
def _count(job):
    """The columns of `SampledAttention.numbers`."""
    rows, heads, lists, room = job[ROWS], job[HEADS], job[LISTS], job[ROOM]
    numbers = array_at(job[NUMBERS], (rows, heads, 7), np.int64)
    index = array_at(job[INDEX], (rows, heads * lists, room), np.int32)
    met = array_at(job[MET], (rows, heads * lists, room), np.uint8)
    count = array_at(job[COUNT], (rows, heads * lists), np.int32)
    looked_up = array_at(job[LOOKED_UP], (rows, heads * lists), np.int32)
    limit = array_at(job[LIMIT], (rows,), np.int64)
    for r in range(rows):
        _, _, reach, end = _ends(job, r)
        before = min(job[SINKS], reach)
        start = max(min(end, reach), before)
        segments = (end + job[SIZE] - 1) // job[SIZE] - job[LOWEST] // job[SIZE] if end > job[LOWEST] else 0
        for g in range(heads):
            union, total, over, read = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
            for i in range(lists):
                li = g * lists + i
                n = np.int64(count[r, li])
                read += looked_up[r, li]
                if n > limit[r] or n > room:
                    over += 1
                    continue
                for c in range(n):
                    total += met[r, li, c]
            mine = numbers[r, g]
            union = _union(index[r, g * lists : (g + 1) * lists], count[r, g * lists : (g + 1) * lists], room)
            mine[0], mine[1], mine[2], mine[5], mine[6] = union, total, over, 2 * read + segments * job[EDGES], end
            mine[3] = 0 if over == lists else union
            mine[4] = reach if over > 0 else union + before + reach - start


@njit
def _union(index, count, room):
    """How many slots ascending lists [lists, room] hold together; a list with more than `room` counts as that many."""
    lists = count.shape[0]
    if lists == 1:
        return np.int64(count[0])
    at, n = np.zeros(lists, np.int64), np.int64(0)
    last = np.int64(1) << 40
    while True:
        least = last
        for i in range(lists):
            if at[i] < min(np.int64(count[i]), room) and count[i] <= room:
                least = min(least, np.int64(index[i, at[i]]))
        if least == last:
            return n
        for i in range(lists):
            if count[i] <= room and at[i] < count[i] and index[i, at[i]] == least:
                at[i] += 1
        n += 1


@njit
def _finish(job):
    top, total, out = _results(job)
    items, width = out.shape[0], out.shape[2]
    lse = array_at(job[LSE], (items, width), np.float32)
    merge(top, total, out, lse, array_at(job[OUT], (items, width, job[DIM]), np.float32))
    _count(job)


@njit
def _law(job):
    """The constants of u, as `add_inclusion` takes them."""
    whole = array_at(job[LAW], (5,), np.int64)
    parts = array_at(job[CONSTANTS], (3 + whole[3] + whole[4],), np.float32)
    coefficients, binomials = parts[3 : 3 + whole[3]], parts[3 + whole[3] :]
    return whole[0], whole[1], whole[2], parts[0], parts[1], coefficients, binomials, parts[2]


@cache
def program_for(dtype):
    """The function of the program for keys of a dtype as `numba_math.to_float` takes it."""

    def run(address, phase):
        try:
            job = fields_at(address, LENGTH)
            if phase == FINISH:
                _finish(job)
            elif phase == PIECES:
                k, v = array_at(job[K], (job[K_SIZE],), dtype), array_at(job[V], (job[K_SIZE],), dtype)
                q = array_at(job[Q], (job[ROWS] * job[HEADS] * job[GROUP] * job[DIM],), dtype)
                _attend(address, job, k, v, q, _law(job))
        except Exception:
            fail(address, FAILED)

    return run
