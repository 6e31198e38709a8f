# mypy: ignore-errors
"""The Triton kernel of attention for tiles of a prompt: a list of keys before the tile, then the tile's own keys.

A program goes through the keys of one tile of rows under one KV head. All rows of the tile take every key of its list,
so whole blocks need no mask, and the tile's rows and query heads fill the rows of the tensor cores. The entries of the
list are read one block ahead of the keys (two where pages have to be looked up), so that no load waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.attend import triton_merging as merging
from longreach.ops.attend.triton_backward_kernels import _tanh
from longreach.ops.attend.triton_merging import LOG2E
from longreach.ops.triton_reads import peek


@triton.jit
def _block(q, k, v, take, state, scale, cap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys [BN, BD] more: (peak [M], total [M], acc [M, BD]). take: [M or 1, BN], read if MASKED."""
    peak, total, acc = state
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        x = cap * LOG2E * _tanh(x * (scale / cap))
    else:
        x = x * (scale * LOG2E)
    if MASKED:
        x = tl.where(take, x, float("-inf"))
    high = tl.maximum(peak, tl.max(x, 1))
    base = high
    if MASKED:
        base = tl.where(high == float("-inf"), 0.0, high)
    p = tl.exp2(x - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return high, total, acc


@triton.jit
def _keys(at, slot, page, column, strides, d, D: tl.constexpr, BD: tl.constexpr, PAGED: tl.constexpr,
          PAGE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """[BN, BD] of keys or values in these slots; 0 where not `column` (if MASKED), and past D."""
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
def attend_tiles(
    rows, memory, lists, result, scale, cap,
    GROUP: tl.constexpr, T: tl.constexpr, TS: tl.constexpr, PIECES: tl.constexpr, HEADS: tl.constexpr,
    MAPPED: tl.constexpr, PAGED: tl.constexpr, TABLED: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile and piece of it, the last ones first; KV head).

    rows: (q, row and head stride, seq, pos, table [tiles, T], start [tiles], tiles); memory: (k, its strides, v, its
    strides, slots in use, block table, its row stride); lists: (index, offsets, head map); result: (out, lse, sink,
    query heads). T rows of a tile, TS of them in a piece; HEADS: entries of the lists' head axis; MAPPED: by a head
    map; PAGED: more than one page a sequence, of PAGE slots; TABLED: there is a block table.
    """
    q_of, q_row, q_head, seq_of, pos_of, table_of, start_of, tiles = rows
    k_of, k_strides, v_of, v_strides, filled, pages, pages_row = memory
    index_of, offset_of, map_of = lists
    out, lse, sink, heads = result
    number = tl.program_id(0)
    tile = tiles - 1 - number // PIECES
    g = tl.program_id(1)
    m, n, d = tl.arange(0, M), tl.arange(0, BN), tl.arange(0, BD)
    within = m // GROUP
    t = number % PIECES * TS + within
    row = tl.load(table_of + tile.to(tl.int64) * T + t, mask=(within < TS) & (t < T), other=-1)
    there = row >= 0
    head = g * GROUP + m % GROUP
    pos = tl.load(pos_of + row, mask=there, other=-1).to(tl.int32)
    seq = tl.max(tl.load(seq_of + row, mask=there, other=0).to(tl.int32), 0).to(tl.int64)
    seen = tl.minimum(pos + 1, tl.load(filled + seq).to(tl.int32))
    last = tl.max(seen, 0)
    if last > 0:
        q = tl.load(
            q_of + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :],
            mask=there[:, None] & (d < D)[None, :],
            other=0.0,
        )
        page_of = pages + seq * pages_row
        k_at, v_at = k_of + g.to(tl.int64) * k_strides[1], v_of + g.to(tl.int64) * v_strides[1]
        if not PAGED:  # one page a sequence
            only = seq
            if TABLED:
                only = tl.load(page_of).to(tl.int64)
            k_at += only * k_strides[0]
            v_at += only * v_strides[0]
        place = tile.to(tl.int64) * HEADS
        if MAPPED:
            place += tl.load(map_of + g).to(tl.int64)
        elif HEADS > 1:
            place += g
        begin = tl.load(offset_of + place).to(tl.int64)
        count = (tl.load(offset_of + place + 1) - begin).to(tl.int32)
        list_of = index_of + begin
        whole = count // BN * BN
        none = n < 0
        state = (
            tl.full((M,), float("-inf"), tl.float32),
            tl.zeros((M,), tl.float32),
            tl.zeros((M, BD), tl.float32),
        )
        slot = peek(list_of + n, n < count).to(tl.int32)
        page, entry = slot, slot
        if PAGED:
            page = peek(page_of + slot // PAGE, n < count)
            entry = peek(list_of + BN + n, BN + n < count).to(tl.int32)
        for at in tl.range(0, whole, BN, num_stages=STAGES):
            near = at + BN + n < count
            if PAGED:
                next_slot = tl.where(near, entry, 0)
                next_page = peek(page_of + next_slot // PAGE, near)
                entry = peek(list_of + at + 2 * BN + n, at + 2 * BN + n < count).to(tl.int32)
            else:
                next_slot = peek(list_of + at + BN + n, near).to(tl.int32)
            k = _keys(k_at, slot, page, none, k_strides, d, D, BD, PAGED, PAGE, False)
            v = _keys(v_at, slot, page, none, v_strides, d, D, BD, PAGED, PAGE, False)
            state = _block(q, k, v, none[None, :], state, scale, cap, CAPPED, False)
            slot = next_slot
            if PAGED:
                page = next_page
        if whole < count:
            column = whole + n < count
            k = _keys(k_at, slot, page, column, k_strides, d, D, BD, PAGED, PAGE, True)
            v = _keys(v_at, slot, page, column, v_strides, d, D, BD, PAGED, PAGE, True)
            state = _block(q, k, v, column[None, :], state, scale, cap, CAPPED, True)
        first = tl.load(start_of + tile).to(tl.int32)
        for at in tl.range(first, last, BN, num_stages=STAGES):
            slot = at + n
            column = slot < last
            page = slot
            if PAGED:
                page = peek(page_of + slot // PAGE, column)
            k = _keys(k_at, slot, page, column, k_strides, d, D, BD, PAGED, PAGE, True)
            v = _keys(v_at, slot, page, column, v_strides, d, D, BD, PAGED, PAGE, True)
            state = _block(q, k, v, slot[None, :] < seen[:, None], state, scale, cap, CAPPED, True)
        peak, total, acc = state
        merging.finish(row, head, peak, total, acc, sink, out, lse, heads, D, SUNK, True, d, there)
    else:  # rows that see nothing
        peak = tl.full((M,), float("-inf"), tl.float32)
        acc = tl.zeros((M, BD), tl.float32)
        merging.finish(row, head, peak, tl.zeros((M,), tl.float32), acc, sink, out, lse, heads, D, SUNK, True, d, there)
