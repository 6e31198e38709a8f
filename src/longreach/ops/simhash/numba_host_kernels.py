# mypy: ignore-errors
"""Attention to sampled keys as a program that CUDA calls: see `numba_host`. The sample is found before, on the GPU."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import njit

from longreach.ops.numba_dots import AHEAD, LINE, row_ahead
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
from longreach.ops.numba_softmax import add_values, merge, soften
from longreach.ops.simhash.attention import HEADS
from longreach.ops.simhash.numba_attention_kernels import (
    CHUNK,
    _dots_and_cosines,
    _exactly,
    _locate,
    agreements,
)
from longreach.ops.simhash.numba_kernels import add_inclusion, log, normalise, widen

# Addresses: q of the keys' dtype [R, H, D]; k, v; table int64 [B, pages]; seq, pos int64 [R]; in_use int64 [B], slots
# in use; held int64 [B], the sequence of each in the tables; limit int64 [R]; ends int32 [held_sequences], of the
# tables; centre float32 [held_sequences, G, D]; found int32 [R, G, parts, part] and counts int32 [R, G, parts, COUNTS],
# as `search_parts` writes them; out float32 [R, H, D]; lse float32 [R, H]; numbers int64 [R, G, 7], the columns of
# NUMBERS; work: `_results`; law: (bits, tables, least, number of coefficients, of binomials) int64; constants float32:
# (split, scale, floor), then both.
# Numbers: rows; heads, KV heads; group; part, positions of one; parts; edges, bytes of a segment's look-ups; lowest,
# size: HashTables.first and size. Flag: own.
JOB = job_type(
    "q", "seq", "pos", "in_use", "held", "limit", "ends", "centre", "found", "counts", "out", "lse", "numbers", "work",
    "law", "constants", "rows", "heads", "group", "dim", "held_sequences", "part", "sinks", "parts", "edges", "lowest",
    "size", "own", *VIEW, "scale:f8", "softcap:f8",
)  # fmt: skip
ANY, ALL, LOOKED_UP, COUNTS = HEADS, HEADS + 1, HEADS + 2, HEADS + 3  # columns of counts, behind those of each head


def work_bytes(items: int, group: int, dim: int, parts: int) -> int:
    """Bytes of a job's own memory. items: KV heads of all rows."""
    return 4 * items * parts * group * (dim + 2)


@njit
def _results(job):
    """top, total [rows KV heads, parts, group] and out of the pieces."""
    items, parts, dim, width, at = job.rows * job.heads, job.parts, job.dim, job.group, job.work
    top = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    total = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    return top, total, array_at(at, (items, parts, width, dim), np.float32)


@njit
def _sums(job, item, sums):
    """The columns of a row's and KV head's counts, over all parts."""
    counts = array_at(job.counts, (job.rows * job.heads, job.parts, COUNTS), np.int32)[item]
    sums[:] = 0
    for p in range(job.parts):
        for c in range(COUNTS):
            sums[c] += counts[p, c]


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
def _weigh(s, entries, first, n, cosines, squares, void, own, softcap, law, sums):
    """Add to the logits s[h, c] the log-weights of entries [first, first + n). own: -inf for heads that did not sample.

    cosines, overwritten: those of the keys less their centre, times their norm.
    """
    u, spread, x, y, z = sums
    width = s.shape[0]
    if softcap > 0.0:
        for h in range(width):
            for c in range(n):
                s[h, c] = softcap * np.float32(math.tanh(s[h, c] / softcap))
    for c in range(n):
        u[c] = spread[c] = np.float32(0.0)
    for h in range(width):
        p = cosines[h]
        agreements(p, squares, n, void[h])
        add_inclusion(p, n, law, x, y, z, u, spread)
        if own:
            for c in range(n):
                sampled = (entries[first + c] >> (16 + h)) & 1
                s[h, c] = s[h, c] - log(u[c]) if sampled else np.float32(-np.inf)
                u[c] = np.float32(0.0)
    if not own:
        for c in range(n):
            met, bits = 0, (entries[first + c] >> 16) & 0xFFFF  # head 15 is the sign, which a shift would copy
            while bits:
                met += bits & 1
                bits >>= 1
            added = log(np.float32(met)) - log(u[c])
            for h in range(width):
                s[h, c] += added


@njit
def _attend(address, job, k, v, q, law):
    """Pieces, taken from the counter: a part's sampled keys, and a share of those that are always attended to."""
    top, total, out = _results(job)
    rows, heads, group, dim, parts, own = job.rows, job.heads, job.group, job.dim, job.parts, job.own != 0
    table = array_at(job.table, (job.sequences, job.pages), np.int64)
    memory = (k, v, (job.k0, job.k1, job.k2), (job.v0, job.v1, job.v2), table, job.paged != 0, job.page)
    centres = array_at(job.centre, (job.held_sequences, heads, dim), np.float32)
    found = array_at(job.found, (rows * heads, parts, job.part), np.int32)
    counts = array_at(job.counts, (rows * heads, parts, COUNTS), np.int32)
    limit = array_at(job.limit, (rows,), np.int64)
    scale, softcap = np.float32(job.scale), job.softcap
    plain, unit = np.empty((group, dim), np.float32), np.empty((group, dim), np.float32)
    void, all_counts = np.empty(group, np.bool_), np.empty(COUNTS, np.int64)
    s, cosines = np.empty((group, CHUNK), np.float32), np.empty((group, CHUNK), np.float32)
    slots, k_places, v_places = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    added, squares, u = np.zeros(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    spread, x, y, z = (
        np.empty(CHUNK, np.float32),
        np.empty(CHUNK, np.float32),
        np.empty(CHUNK, np.float32),
        np.empty(CHUNK, np.float32),
    )
    scratch, sums = (slots, k_places, v_places, added, s), (u, spread, x, y, z)
    size = LINE // k.itemsize
    lines = (dim + size - 1) // size
    counter, pieces = counter_of(address), rows * heads * parts
    w = take(counter)
    while w < pieces:
        item, part = w // parts, w % parts
        w = take(counter)
        r, g = item // heads, item % heads
        b, at, reach, end = _ends(job, r)
        _sums(job, item, all_counts)
        for h in range(group):
            begin = (r * heads * group + g * group + h) * dim
            void[h] = widen(q[begin : begin + dim], plain[h])
            for d in range(dim):
                unit[h, d] = plain[h, d]
                plain[h, d] *= scale
            normalise(unit[h], void[h])
        m, t, o = top[item, part], total[item, part], out[item, part]
        m[:] = np.float32(-np.inf)
        t[:] = np.float32(0.0)
        o[:] = np.float32(0.0)
        before = min(job.sinks, reach)
        start = max(min(end, reach), before)
        always = before + reach - start  # counted through: the sinks, then those from the end of the tables on
        low, high = always * part // parts, always * (part + 1) // parts
        _exactly(low, min(high, before), memory, b, g, plain, softcap, m, t, o, scratch)
        low, high = max(low, before) - before + start, high - before + start
        _exactly(low, high, memory, b, g, plain, softcap, m, t, o, scratch)
        rest = start - before  # that lists which are too long leave to be attended to
        low, high = before + rest * part // parts, before + rest * (part + 1) // parts
        if not own and all_counts[ANY] > limit[r]:
            _exactly(low, high, memory, b, g, plain, softcap, m, t, o, scratch)
            continue
        full = 0
        for h in range(group):
            if own and all_counts[h] > limit[r]:
                full |= 1 << h
                one = slice(h, h + 1)
                mine = (slots, k_places, v_places, added, s[one])
                _exactly(low, high, memory, b, g, plain[one], softcap, m[one], t[one], o[one], mine)
        entries, n = found[item, part], np.int64(counts[item, part, ANY])
        first, base = 0, part * job.part
        while first < n:
            some = min(CHUNK, n - first)
            right = True
            for c in range(some):
                slots[c] = base + (entries[first + c] & 0xFFFF)
                right &= slots[c] < reach
            if not right:
                fail(address, WRONG_ENTRIES)
                break
            _locate(slots, some, memory, b, g, k_places, v_places, lines, size)
            _dots_and_cosines(k, k_places, some, centres[at, g], plain, unit, size, lines, squares, s, cosines)
            for c in range(min(AHEAD, some)):  # they arrive while the weights are computed
                row_ahead(v, v_places[c], size, lines)
            _weigh(s, entries, first, some, cosines, squares, void, own, softcap, law, sums)
            for h in range(group):
                if (full >> h) & 1:
                    s[h, :some] = np.float32(-np.inf)
            soften(s, some, added, False, 0.0, m, t, o, dim)
            add_values(v, v_places, some, s, o, dim, size, lines)
            first += some


@njit
def _count(job):
    """The columns of `SampledAttention.numbers`."""
    numbers = array_at(job.numbers, (job.rows, job.heads, 7), np.int64)
    limit = array_at(job.limit, (job.rows,), np.int64)
    sums = np.empty(COUNTS, np.int64)
    for r in range(job.rows):
        _, _, reach, end = _ends(job, r)
        before = min(job.sinks, reach)
        start = max(min(end, reach), before)
        segments = (end + job.size - 1) // job.size - job.lowest // job.size if end > job.lowest else 0
        for g in range(job.heads):
            _sums(job, r * job.heads + g, sums)
            over, met = np.int64(0), np.int64(0)
            if job.own:
                for h in range(job.group):
                    fits = sums[h] <= limit[r]
                    over += 0 if fits else 1
                    met += sums[h] if fits else 0
            else:
                over = 1 if sums[ANY] > limit[r] else 0
                met = 0 if over else sums[ALL]
            mine = numbers[r, g]
            mine[0], mine[1], mine[2], mine[6] = sums[ANY], met, over, end
            mine[3] = 0 if over == (job.group if job.own else 1) else sums[ANY]
            mine[4] = reach if over else sums[ANY] + before + reach - start
            mine[5] = 2 * sums[LOOKED_UP] + segments * job.edges


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
        except Exception:  # Numba takes no narrower one; `HostCalls.check` raises what is noted here
            fail(address, FAILED)

    return run
