# mypy: ignore-errors
"""The Triton kernels of tile_log_sums and tile_scores: products of a tile's queries with blocks of keys, never kept.

A program holds M rows x query heads: those of one tile, or of COMBINE neighbouring tiles if they are small. If these
are of several sequences, it goes through the keys of each tile apart. The scores' program computes keys x queries, so
that the sum over a tile's rows lies within a thread; the log-sums' program queries x keys, for the same reason.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.triton_reads import peek

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr((1 << 30) - 1)


@triton.jit
def _tanh(x):
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def _logits(x, scale, cap, CAPPED: tl.constexpr):
    """Logits in base 2 from products."""
    if CAPPED:
        x = cap * LOG2E * _tanh(x * (scale / cap))
    else:
        x = x * (scale * LOG2E)
    return x


@triton.jit
def _rows_of(first, g, rows, GROUP: tl.constexpr, T: tl.constexpr, W: tl.constexpr, M: tl.constexpr):
    """Of the rows x heads of a program: row (-1 for none), query head, sequence (-1 for none), tile; [M] each."""
    _, _, _, seq_of, _, table_of, _, tiles = rows
    m = tl.arange(0, M)
    tile, within = first + m // W, m % W
    there = (tile < tiles) & (within < T * GROUP)
    row = tl.load(table_of + tile.to(tl.int64) * T + within // GROUP, mask=there, other=-1)
    seq = tl.load(seq_of + row, mask=row >= 0, other=-1).to(tl.int32)
    return row, g * GROUP + within % GROUP, seq, tile


@triton.jit
def _queries(row, head, rows, D: tl.constexpr, BD: tl.constexpr):
    """[M, BD]; 0 for row -1 and past D."""
    q_of, q_row, q_head, _, _, _, _, _ = rows
    d = tl.arange(0, BD)
    at = row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :]
    return tl.load(q_of + at, mask=(row >= 0)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _keys_of(seq, g, memory, PAGED: tl.constexpr, TABLED: tl.constexpr):
    """Where the keys of a sequence and KV head begin, and its row of the block table."""
    k_of, k_strides, _, pages, pages_row = memory
    at = k_of + g.to(tl.int64) * k_strides[1]
    seq = tl.maximum(seq, 0).to(tl.int64)
    page_of = pages + seq * pages_row
    if not PAGED:
        page = seq
        if TABLED:
            page = tl.load(page_of).to(tl.int64)
        at += page * k_strides[0]
    return at, page_of


@triton.jit
def _keys(at, slot, page, column, memory, D: tl.constexpr, BD: tl.constexpr, PAGED: tl.constexpr,
          PAGE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """[BN, BD] of the keys in these slots; 0 where not `column` (if MASKED), and past D."""
    _, strides, _, _, _ = memory
    d = tl.arange(0, BD)
    if PAGED:
        place = page.to(tl.int64) * strides[0] + (slot % PAGE).to(tl.int64) * strides[2]
    else:
        place = slot.to(tl.int64) * strides[2]
    where = at + place[:, None] + d[None, :]
    if MASKED and BD != D:
        x = tl.load(where, mask=column[:, None] & (d < D)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(where, mask=column[:, None], other=0.0)
    elif BD != D:
        x = tl.load(where, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(where)
    return x


@triton.jit
def _score_block(
    at, slot, page, column, q, base, starts, mine, tile, g, out, memory, scale, cap,
    GROUP: tl.constexpr, COMBINE: tl.constexpr, W: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores of one block of keys, written. tile, starts, mine: [COMBINE], tiles, their starts, which of them count."""
    out_of, out_tile, out_head = out
    k = _keys(at, slot, page, column, memory, D, BD, PAGED, PAGE, MASKED)
    x = _logits(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, cap, CAPPED)
    p = tl.exp2(x - base[None, :])
    to = out_of + g.to(tl.int64) * out_head
    if COMBINE == 1:
        s = tl.sum(p, 1)
        one, start = tl.sum(tile, 0), tl.sum(tl.where(mine, starts, 0), 0)
        tl.store(to + one.to(tl.int64) * out_tile + slot, s, mask=slot < start)
    else:
        s = tl.sum(tl.reshape(p, (BN, COMBINE, W)), 2)
        write = mine[None, :] & (slot[:, None] < starts[None, :])
        tl.store(to + tile.to(tl.int64)[None, :] * out_tile + slot[:, None], s, mask=write)


@triton.jit
def score(
    rows, memory, lse_of, out, heads, scale, cap,
    GROUP: tl.constexpr, T: tl.constexpr, W: tl.constexpr, COMBINE: tl.constexpr, PAGED: tl.constexpr,
    TABLED: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (COMBINE tiles and KEYS slots, all tiles of a stretch of slots first; KV head).

    rows: (q, row and head stride, seq, pos, table [tiles, T], start [tiles], tiles); memory: (k, its strides, slots in
    use, block table, its row stride); lse [R, heads]; out: (scores, tile and head stride). W: the power of two from
    T * GROUP on.
    """
    tiles, start_of = rows[7], rows[6]
    sets = (tiles + COMBINE - 1) // COMBINE
    number, g = tl.program_id(0), tl.program_id(1)
    first, begin = number % sets * COMBINE, number // sets * KEYS
    c = tl.arange(0, COMBINE)
    tile = first + c
    starts = tl.load(start_of + tile, mask=tile < tiles, other=0).to(tl.int32)
    n = tl.arange(0, BN)
    if begin < tl.max(starts, 0):
        row, head, seq, of = _rows_of(first, g, rows, GROUP, T, W, M)
        q = _queries(row, head, rows, D, BD)
        base = tl.load(lse_of + row.to(tl.int64) * heads + head, mask=row >= 0, other=float("-inf")).to(tl.float32)
        base = tl.where(base == float("-inf"), float("inf"), base * LOG2E)  # of rows that see nothing: weight 0
        lowest, highest = tl.min(tl.where(row >= 0, seq, FAR), 0), tl.max(seq, 0)
        single = lowest >= highest
        for turn in range(0, tl.where(single, 1, COMBINE)):
            mine = single | (c == turn)
            here = tl.max(tl.where(single | (of - first == turn), seq, -1), 0)
            at, page_of = _keys_of(here, g, memory, PAGED, TABLED)
            stop = tl.minimum(tl.max(tl.where(mine, starts, 0), 0), begin + KEYS)
            stop = tl.where(here >= 0, stop, begin)
            whole = begin + (stop - begin) // BN * BN
            for key in tl.range(begin, whole, BN, num_stages=STAGES):
                slot = key + n
                page = slot
                if PAGED:
                    page = peek(page_of + slot // PAGE, slot < stop)
                _score_block(
                    at, slot, page, slot < stop, q, base, starts, mine, tile, g, out, memory, scale, cap,
                    GROUP, COMBINE, W, PAGED, PAGE, CAPPED, D, BD, BN, False,
                )  # fmt: skip
            if whole < stop:
                slot = whole + n
                page = slot
                if PAGED:
                    page = peek(page_of + slot // PAGE, slot < stop)
                _score_block(
                    at, slot, page, slot < stop, q, base, starts, mine, tile, g, out, memory, scale, cap,
                    GROUP, COMBINE, W, PAGED, PAGE, CAPPED, D, BD, BN, True,
                )  # fmt: skip


@triton.jit
def _more(k, q, take, more, peak, total, scale, cap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Peak and sum [M] with one block of keys more. take: [M, BN], read if MASKED; more: added to the logits."""
    x = _logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED) + more
    if MASKED:
        x = tl.where(take, x, float("-inf"))
    high = tl.maximum(peak, tl.max(x, 1))
    base = tl.where(high == float("-inf"), 0.0, high)
    return high, total * tl.exp2(peak - base) + tl.sum(tl.exp2(x - base[:, None]), 1)


@triton.jit
def log_sums(
    rows, memory, sink, lse_of, heads, scale, cap,
    GROUP: tl.constexpr, T: tl.constexpr, W: tl.constexpr, COMBINE: tl.constexpr, PAGED: tl.constexpr,
    TABLED: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, EVERY: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (COMBINE tiles, the last ones first; KV head). Arguments as `score` has them; sink: [heads].

    EVERY > 1: of slots [FIRST, start - LAST) every so many-th is read, and counts as so many.
    """
    _, _, _, _, pos_of, _, start_of, tiles = rows
    filled = memory[2]
    g = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * COMBINE
    row, head, seq, of = _rows_of(first, g, rows, GROUP, T, W, M)
    there = row >= 0
    pos = tl.load(pos_of + row, mask=there, other=-1).to(tl.int32)
    seen = tl.minimum(pos + 1, tl.load(filled + seq, mask=there, other=0).to(tl.int32))
    q = _queries(row, head, rows, D, BD)
    n = tl.arange(0, BN)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    lowest, highest = tl.min(tl.where(there, seq, FAR), 0), tl.max(seq, 0)
    single = lowest >= highest
    for turn in range(0, tl.where(single, 1, COMBINE)):
        mine = there & (single | (of - first == turn))
        here = tl.max(tl.where(mine, seq, -1), 0)
        at, page_of = _keys_of(here, g, memory, PAGED, TABLED)
        sees = tl.where(mine, seen, 0)
        last = tl.max(sees, 0)
        whole = tl.minimum(tl.min(tl.where(mine, seen, FAR), 0), last) // BN * BN  # all of the rows see these
        high = tl.full((M,), float("-inf"), tl.float32)
        sum_of = tl.zeros((M,), tl.float32)
        begin = tl.zeros((M,), tl.int32)  # from where on a row's keys are read one by one
        if EVERY > 1:
            starts = tl.load(start_of + of, mask=mine, other=0).to(tl.int32)
            begin = tl.maximum(starts - LAST, FIRST)
            end = tl.max(tl.where(mine, begin, 0), 0)
            for key in tl.range(0, tl.minimum(FIRST, last), BN, num_stages=STAGES):
                slot = key + n
                page = slot
                if PAGED:
                    page = peek(page_of + slot // PAGE, slot < last)
                column = (slot < FIRST) & (slot < last)
                k = _keys(at, slot, page, column, memory, D, BD, PAGED, PAGE, True)
                take = (slot < FIRST)[None, :] & (slot[None, :] < sees[:, None])
                high, sum_of = _more(k, q, take, 0.0, high, sum_of, scale, cap, CAPPED, True)
            for key in tl.range(FIRST, end, BN * EVERY, num_stages=STAGES):
                slot = key + n * EVERY
                page = slot
                if PAGED:
                    page = peek(page_of + slot // PAGE, slot < end)
                k = _keys(at, slot, page, slot < end, memory, D, BD, PAGED, PAGE, True)
                take = mine[:, None] & (slot[None, :] < begin[:, None])
                shift = tl.log2(tl.full((), EVERY, tl.float32))
                high, sum_of = _more(k, q, take, shift, high, sum_of, scale, cap, CAPPED, True)
            whole = tl.minimum(tl.min(tl.where(mine, begin, FAR), 0), last)
        for key in tl.range(0, whole if EVERY == 1 else 0, BN, num_stages=STAGES):
            slot = key + n
            page = slot
            if PAGED:
                page = peek(page_of + slot // PAGE, slot < last)
            k = _keys(at, slot, page, slot < last, memory, D, BD, PAGED, PAGE, False)
            high, sum_of = _more(k, q, mine[:, None], 0.0, high, sum_of, scale, cap, CAPPED, False)
        for key in tl.range(whole, last, BN, num_stages=STAGES):
            slot = key + n
            page = slot
            if PAGED:
                page = peek(page_of + slot // PAGE, slot < last)
            k = _keys(at, slot, page, slot < last, memory, D, BD, PAGED, PAGE, True)
            take = (slot[None, :] < sees[:, None]) & (slot[None, :] >= begin[:, None])
            high, sum_of = _more(k, q, take, 0.0, high, sum_of, scale, cap, CAPPED, True)
        peak, total = tl.where(mine, high, peak), tl.where(mine, sum_of, total)
    if SUNK:
        x = tl.load(sink + head, mask=there, other=float("-inf")).to(tl.float32) * LOG2E
        high = tl.maximum(peak, x)
        base = tl.where(high == float("-inf"), 0.0, high)
        total = total * tl.exp2(peak - base) + tl.exp2(x - base)
        peak = high
    some = total > 0
    result = tl.where(some, (peak + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse_of + row.to(tl.int64) * heads + head, result, mask=there)
