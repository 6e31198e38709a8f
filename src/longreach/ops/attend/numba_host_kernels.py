# mypy: ignore-errors
"""attend as a program that CUDA calls: see `numba_host`. Prepare finds slots and lists, pieces attend, finish merges."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from longreach.ops.attend.numba_kernels import _piece, disjoint
from longreach.ops.numba_host import (
    FAILED,
    FIELDS,
    FINISH,
    PREPARE,
    WRONG_ENTRIES,
    array_at,
    counter_of,
    fail,
    float_at,
    job_at,
)
from longreach.ops.numba_math import take
from longreach.ops.numba_softmax import merge

# Fields of a job, behind those of every job. Addresses: q of the keys' dtype [R, H, D]; k, v; table int64 [B, pages];
# seq, pos int64 [R]; in_use int64 [B], slots in use; values int64 [R, heads, 2, S], start and stop of spans; index int32, weight float32 [L, lists, C], count int32 [L,
# lists]; row_to_list [R] and head_map [units] int64; out float32 [R, H, D], lse float32 [R, H]; work, see `WORK`.
# Numbers: rows, units (rows' streams: of KV heads, or of query heads that choose for themselves), width (query heads of
# a stream), mine (streams of a KV head), dim; strides of k and v (page, head, slot); pages of the table, slots a page;
# sequences; heads and spans of values; lists of the head axis, room of a list, block; parts of a stream; scale,
# softcap as float64; from_start, from_stop: bit s is set if a row's position is to be added to span s. Flags: spans,
# weighted, paged.
NAMES = (
    "q", "k", "v", "table", "seq", "pos", "in_use", "values", "index", "weight", "count", "row_to_list",
    "head_map", "out", "lse", "work", "rows", "units", "width", "mine", "dim", "k_size", "k0", "k1", "k2", "v0", "v1",
    "v2", "pages", "page", "sequences", "bound_heads", "bound_count", "lists", "entries", "room", "block", "parts",
    "scale", "softcap", "from_start", "from_stop", "spans",
    "weighted", "paged",
)  # fmt: skip
(
    Q, K, V, TABLE, SEQ, POS, IN_USE, VALUES, INDEX, WEIGHT, COUNT, ROW_TO_LIST, HEAD_MAP, OUT, LSE, WORK,
    ROWS, UNITS, WIDTH, MINE, DIM, K_SIZE, K0, K1, K2, V0, V1, V2, PAGES, PAGE, SEQUENCES, BOUND_HEADS, BOUND_COUNT,
    LISTS, ENTRIES, ROOM, BLOCK, PARTS, SCALE, SOFTCAP, FROM_START, FROM_STOP, SPANS, WEIGHTED, PAGED,
) = range(FIELDS, FIELDS + len(NAMES))  # fmt: skip
LENGTH = FIELDS + len(NAMES)


def work_bytes(rows: int, units: int, width: int, dim: int, parts: int) -> int:
    """Bytes of a job's own memory."""
    return 8 * (3 * rows + 2 * rows * units) + 4 * rows * units * parts * width * (dim + 2)


@njit
def _arrays(job):
    """filled, low, high [R, 1], begin, length [R units], top, total [R units, parts, width] and out of the pieces."""
    rows, items, parts, width, dim = job[ROWS], job[ROWS] * job[UNITS], job[PARTS], job[WIDTH], job[DIM]
    at = job[WORK]
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
    rows, units, spans = job[ROWS], job[UNITS], job[SPANS] != 0
    seq, pos = array_at(job[SEQ], (rows,), np.int64), array_at(job[POS], (rows,), np.int64)
    in_use = array_at(job[IN_USE], (job[SEQUENCES],), np.int64)
    for r in range(rows):
        filled[r] = in_use[seq[r]]
        low[r, 0], high[r, 0] = 0, max(0, min(filled[r], pos[r] + 1))
    if spans:
        shape = (rows, job[BOUND_HEADS], 2, job[BOUND_COUNT])
        bounds = array_at(job[VALUES], shape, np.int64)
        for r in range(rows):
            for h in range(bounds.shape[1]):
                for s in range(bounds.shape[3]):
                    bounds[r, h, 0, s] += pos[r] * ((job[FROM_START] >> s) & 1)
                    bounds[r, h, 1, s] += pos[r] * ((job[FROM_STOP] >> s) & 1)
        disjoint(bounds, high[:, 0])
        return
    lists, room = job[LISTS], job[ROOM]
    row_to_list = array_at(job[ROW_TO_LIST], (rows,), np.int64)
    head_map = array_at(job[HEAD_MAP], (units,), np.int64)
    count = array_at(job[COUNT], (job[ENTRIES] * lists,), np.int32)
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
    rows = job[ROWS]
    doubt = np.zeros(1, np.int64)  # whether entries do not ascend, which they need not
    paged, spans = job[PAGED] != 0, job[SPANS] != 0
    table = array_at(job[TABLE], (job[SEQUENCES], job[PAGES]), np.int64)
    memory = (k, v, (job[K0], job[K1], job[K2]), (job[V0], job[V1], job[V2]), table, paged, job[PAGE])
    bounds = array_at(job[VALUES], (rows, job[BOUND_HEADS], 2, job[BOUND_COUNT]), np.int64)
    size = job[ENTRIES] * job[LISTS] * job[ROOM]
    index = array_at(job[INDEX], (size,), np.int32)
    weight = array_at(job[WEIGHT], (size,), np.float32)
    scale, softcap = np.float32(float_at(job[SCALE])), float_at(job[SOFTCAP])
    given = (array_at(job[SEQ], (rows,), np.int64), filled, low, high, scale, job[UNITS], job[MINE])
    which = (spans, bounds, index, weight, job[WEIGHTED] != 0, begin, length, job[BLOCK])
    known = (False, np.zeros((1, 1, 1, 1), np.float32))
    results = (top, total, out, doubt)
    counter, pieces = counter_of(address), out.shape[0] * out.shape[1]
    w = take(counter)
    while w < pieces:
        unit, part = w // out.shape[1], w % out.shape[1]
        if not spans and length[unit] > 0:
            keys = length[unit] * job[BLOCK]
            first, last = keys * part // out.shape[1], keys * (part + 1) // out.shape[1]
            ends = first // job[BLOCK], (last + job[BLOCK] - 1) // job[BLOCK]
            if not _in_range(index, begin[unit], ends[0], ends[1], job[BLOCK], filled[unit // job[UNITS]]):
                fail(address, WRONG_ENTRIES)
        _piece(w, q, memory, given, which, softcap, known, results)
        w = take(counter)


@njit
def _finish(job):
    _, _, _, _, _, top, total, out = _arrays(job)
    items, width = out.shape[0], out.shape[2]
    lse = array_at(job[LSE], (items, width), np.float32)
    merge(top, total, out, lse, array_at(job[OUT], (items, width, job[DIM]), np.float32))


@cache
def program_for(dtype):
    """The function of the program for keys of a dtype as `numba_math.to_float` takes it."""

    def run(address, phase):
        try:
            job = job_at(address, LENGTH)
            if phase == PREPARE:
                _prepare(job)
            elif phase == FINISH:
                _finish(job)
            else:
                k, v = array_at(job[K], (job[K_SIZE],), dtype), array_at(job[V], (job[K_SIZE],), dtype)
                q = array_at(job[Q], (job[ROWS] * job[UNITS] * job[WIDTH] * job[DIM],), dtype)
                _attend(address, job, k, v, q)
        except Exception:
            fail(address, FAILED)

    return run
