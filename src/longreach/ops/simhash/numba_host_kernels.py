# mypy: ignore-errors
"""Attention to sampled keys as a program that CUDA calls: see `numba_host`. The sample is found before, on the GPU."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from longreach.ops.numba_host import (
    FAILED,
    FINISH,
    PIECES,
    VIEW,
    WRONG_ENTRIES,
    array_at,
    counter_of,
    fail,
    job_type,
)
from longreach.ops.numba_math import take
from longreach.ops.numba_softmax import merge
from longreach.ops.simhash.numba_attention_kernels import CHUNK, _by_sample, _exactly
from longreach.ops.simhash.numba_kernels import normalise, widen

# Addresses: q of the keys' dtype [R, H, D]; k, v; table int64 [B, pages]; seq, pos int64 [R]; in_use int64 [B], slots
# in use; held int64 [B], the sequence of each in the tables; limit int64 [R]; ends int32 [held_sequences], of the
# tables; centre float32 [held_sequences, G, D]; index int32, met uint8 [R, G lists, room]; count, looked_up int32 [R, G
# lists]; out float32 [R, H, D]; lse float32 [R, H]; numbers int64 [R, G, 7], the columns of NUMBERS; work: `_results`;
# law: (bits, tables, least, number of coefficients, of binomials) int64; constants float32: (split, scale, floor), then
# both.
# Numbers: rows; heads, KV heads; lists of a KV head, 1 or group; parts of a list; edges, bytes of a segment's look-ups;
# lowest, size: HashTables.first and size.
JOB = job_type(
    "q", "seq", "pos", "in_use", "held", "limit", "ends", "centre", "index", "met", "count", "looked_up", "out", "lse",
    "numbers", "work", "law", "constants", "rows", "heads", "lists", "group", "dim", "held_sequences", "room", "sinks",
    "parts", "edges", "lowest", "size", *VIEW, "scale:f8", "softcap:f8",
)  # fmt: skip


def work_bytes(items: int, width: int, dim: int, parts: int) -> int:
    """Bytes of a job's own memory. items: lists of all rows."""
    return 4 * items * parts * width * (dim + 2)


@njit
def _results(job):
    """top, total [lists, parts, width] and out of the pieces. Lists are those of all rows."""
    items, parts, dim = job.rows * job.heads * job.lists, job.parts, job.dim
    width, at = job.group // job.lists, job.work
    top = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    total = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    return top, total, array_at(at, (items, parts, width, dim), np.float32)


@njit
def _ends(job, row):
    """What a row sees: its sequence, that in the tables, the slots that it reaches, and the end of the tables."""
    b = array_at(job.seq, (job.rows,), np.int64)[row]
    pos = array_at(job.pos, (job.rows,), np.int64)[row]
    filled = array_at(job.in_use, (job.sequences,), np.int64)[b]
    at = array_at(job.held, (job.sequences,), np.int64)[b]
    end = np.int64(array_at(job.ends, (job.held_sequences,), np.int32)[at])
    return b, at, max(0, min(pos + 1, filled)), end


@njit
def _attend(address, job, k, v, q, law):
    """Pieces of lists, and of the slots that are always attended to, taken from the counter."""
    top, total, out = _results(job)
    rows, heads, lists, group, dim, room = job.rows, job.heads, job.lists, job.group, job.dim, job.room
    width, parts, sinks = group // lists, job.parts, job.sinks
    table = array_at(job.table, (job.sequences, job.pages), np.int64)
    memory = (k, v, (job.k0, job.k1, job.k2), (job.v0, job.v1, job.v2), table, job.paged != 0, job.page)
    centres = array_at(job.centre, (job.held_sequences, heads, dim), np.float32)
    index = array_at(job.index, (rows, heads * lists, room), np.int32)
    met = array_at(job.met, (rows, heads * lists, room), np.uint8)
    count = array_at(job.count, (rows, heads * lists), np.int32)
    limit = array_at(job.limit, (rows,), np.int64)
    scale, softcap = np.float32(job.scale), job.softcap
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
    rows, heads, lists, room = job.rows, job.heads, job.lists, job.room
    numbers = array_at(job.numbers, (rows, heads, 7), np.int64)
    index = array_at(job.index, (rows, heads * lists, room), np.int32)
    met = array_at(job.met, (rows, heads * lists, room), np.uint8)
    count = array_at(job.count, (rows, heads * lists), np.int32)
    looked_up = array_at(job.looked_up, (rows, heads * lists), np.int32)
    limit = array_at(job.limit, (rows,), np.int64)
    for r in range(rows):
        _, _, reach, end = _ends(job, r)
        before = min(job.sinks, reach)
        start = max(min(end, reach), before)
        segments = (end + job.size - 1) // job.size - job.lowest // job.size if end > job.lowest else 0
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
            mine[0], mine[1], mine[2], mine[5], mine[6] = union, total, over, 2 * read + segments * job.edges, end
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
    lse = array_at(job.lse, (items, width), np.float32)
    merge(top, total, out, lse, array_at(job.out, (items, width, job.dim), np.float32))
    _count(job)


@njit
def _law(job):
    """The constants of u, as `add_inclusion` takes them."""
    whole = array_at(job.law, (5,), np.int64)
    parts = array_at(job.constants, (3 + whole[3] + whole[4],), np.float32)
    coefficients, binomials = parts[3 : 3 + whole[3]], parts[3 + whole[3] :]
    return whole[0], whole[1], whole[2], parts[0], parts[1], coefficients, binomials, parts[2]


@cache
def program_for(dtype):
    """The function of the program for keys of a dtype as `numba_math.to_float` takes it."""

    def run(address, phase):
        try:
            job = array_at(address, (1,), JOB)[0]
            if phase == FINISH:
                _finish(job)
            elif phase == PIECES:
                k, v = array_at(job.k, (job.k_size,), dtype), array_at(job.v, (job.v_size,), dtype)
                q = array_at(job.q, (job.rows * job.heads * job.group * job.dim,), dtype)
                _attend(address, job, k, v, q, _law(job))
        except Exception:
            fail(address, FAILED)

    return run
