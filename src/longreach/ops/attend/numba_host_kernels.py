# mypy: ignore-errors
"""attend as a program that CUDA calls, see `numba_host`: it finds slots and lists, attends in pieces, and merges."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from longreach.ops.attend.numba_kernels import _piece, disjoint
from longreach.ops.numba_host import (
    FAILED,
    FINISH,
    PREPARE,
    VIEW,
    WRONG_ENTRIES,
    array_at,
    counter_of,
    fail,
    job_type,
)
from longreach.ops.numba_math import take
from longreach.ops.numba_softmax import merge

# Addresses: q of the keys' dtype [R, H, D]; k, v; table int64 [B, pages]; seq, pos int64 [R]; in_use int64 [B], slots
# in use; values int64 [R, bound_heads, 2, bound_count], start and stop of spans; index int32, weight float32 [entries,
# lists, room], count int32 [entries, lists]; row_to_list int64 [R]; head_map int64 [units]; out float32 [R, H, D]; lse
# float32 [R, H]; work: `_arrays`.
# Numbers: rows; units, streams of a row: its KV heads, or its query heads if these choose for themselves; width, query
# heads of a stream; mine, streams of a KV head; pages of the table; page, slots in one; parts of a stream; from_start,
# from_stop: bit s is set if a row's position is to be added to span s. Flags: spans, weighted, paged.
JOB = job_type(
    "q", "values", "index", "weight", "count", "row_to_list", "head_map", "out", "lse", "work", "seq", "pos", "in_use",
    "rows", "units", "width", "mine", "dim", "bound_heads", "bound_count", "lists", "entries", "room", "block", "parts",
    "from_start", "from_stop", "spans", "weighted", *VIEW, "scale:f8", "softcap:f8",
)  # fmt: skip


def work_bytes(rows: int, units: int, width: int, dim: int, parts: int) -> int:
    """Bytes of a job's own memory."""
    return 8 * (3 * rows + 2 * rows * units) + 4 * rows * units * parts * width * (dim + 2)


@njit
def _arrays(job):
    """filled, low, high [R, 1], begin, length [R units], top, total [R units, parts, width] and out of the pieces."""
    rows, items, parts, width, dim = job.rows, job.rows * job.units, job.parts, job.width, job.dim
    at = job.work
    filled = array_at(at, (rows,), np.int64)
    low = array_at(at + 8 * rows, (rows, 1), np.int64)
    high = array_at(at + 16 * rows, (rows, 1), np.int64)
    at += 24 * rows
    begin, length = array_at(at, (items,), np.int64), array_at(at + 8 * items, (items,), np.int64)
    at += 16 * items
    top = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    total = array_at(at, (items, parts, width), np.float32)
    at += 4 * items * parts * width
    return filled, low, high, begin, length, top, total, array_at(at, (items, parts, width, dim), np.float32)


@njit
def _prepare(job):
    filled, low, high, begin, length, _, _, _ = _arrays(job)
    rows, units, spans = job.rows, job.units, job.spans != 0
    seq, pos = array_at(job.seq, (rows,), np.int64), array_at(job.pos, (rows,), np.int64)
    in_use = array_at(job.in_use, (job.sequences,), np.int64)
    for r in range(rows):
        filled[r] = in_use[seq[r]]
        low[r, 0], high[r, 0] = 0, max(0, min(filled[r], pos[r] + 1))
    if spans:
        shape = (rows, job.bound_heads, 2, job.bound_count)
        bounds = array_at(job.values, shape, np.int64)
        for r in range(rows):
            for h in range(bounds.shape[1]):
                for s in range(bounds.shape[3]):
                    bounds[r, h, 0, s] += pos[r] * ((job.from_start >> s) & 1)
                    bounds[r, h, 1, s] += pos[r] * ((job.from_stop >> s) & 1)
        disjoint(bounds, high[:, 0])
        return
    lists, room = job.lists, job.room
    row_to_list = array_at(job.row_to_list, (rows,), np.int64)
    head_map = array_at(job.head_map, (units,), np.int64)
    count = array_at(job.count, (job.entries * lists,), np.int32)
    for r in range(rows):
        for u in range(units):
            entry = row_to_list[r] * lists + head_map[u]
            n = np.int64(count[entry])
            begin[r * units + u], length[r * units + u] = entry * room, n if n <= room else -1


@njit
def _in_range(index, begin, first, last, block, filled):
    """Whether entries [first, last) of the list at `begin` name slots below `filled`."""
    right = True
    for i in range(begin + first, begin + last):
        entry = np.int64(index[i])
        right &= entry >= 0 and entry * block < filled
    return right


@njit
def _attend(address, job, k, v, q):
    filled, low, high, begin, length, top, total, out = _arrays(job)
    rows = job.rows
    doubt = np.zeros(1, np.int64)  # whether entries of a piece do not ascend, which they need not, or are out of range
    paged, spans = job.paged != 0, job.spans != 0
    table = array_at(job.table, (job.sequences, job.pages), np.int64)
    memory = (k, v, (job.k0, job.k1, job.k2), (job.v0, job.v1, job.v2), table, paged, job.page)
    bounds = array_at(job.values, (rows, job.bound_heads, 2, job.bound_count), np.int64)
    size = job.entries * job.lists * job.room
    index = array_at(job.index, (size,), np.int32)
    weight = array_at(job.weight, (size,), np.float32)
    scale, softcap = np.float32(job.scale), job.softcap
    given = (array_at(job.seq, (rows,), np.int64), filled, low, high, scale, job.units, job.mine)
    which = (spans, bounds, index, weight, job.weighted != 0, begin, length, job.block)
    known = (False, np.zeros((1, 1, 1, 1), np.float32))
    results = (top, total, out, doubt)
    counter, pieces = counter_of(address), out.shape[0] * out.shape[1]
    w = take(counter)
    while w < pieces:
        unit, part = w // out.shape[1], w % out.shape[1]
        doubt[0] = 0
        _piece(w, q, memory, given, which, softcap, known, results)
        if doubt[0]:
            keys = length[unit] * job.block
            first, last = keys * part // out.shape[1], keys * (part + 1) // out.shape[1]
            ends = first // job.block, (last + job.block - 1) // job.block
            if not _in_range(index, begin[unit], ends[0], ends[1], job.block, filled[unit // job.units]):
                fail(address, WRONG_ENTRIES)
        w = take(counter)


@njit
def _finish(job):
    _, _, _, _, _, top, total, out = _arrays(job)
    items, width = out.shape[0], out.shape[2]
    lse = array_at(job.lse, (items, width), np.float32)
    merge(top, total, out, lse, array_at(job.out, (items, width, job.dim), np.float32))


@cache
def program_for(dtype):
    """The function of the program for keys of a dtype as `numba_math.to_float` takes it."""

    def run(address, phase):
        try:
            job = array_at(address, (1,), JOB)[0]
            if phase == PREPARE:
                _prepare(job)
            elif phase == FINISH:
                _finish(job)
            else:
                k, v = array_at(job.k, (job.k_size,), dtype), array_at(job.v, (job.v_size,), dtype)
                q = array_at(job.q, (job.rows * job.units * job.width * job.dim,), dtype)
                _attend(address, job, k, v, q)
        except Exception:  # Numba takes no narrower one; `HostCalls.check` raises what is noted here
            fail(address, FAILED)

    return run
