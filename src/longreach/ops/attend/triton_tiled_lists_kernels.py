# mypy: ignore-errors
"""The Triton kernels of attention over lists of blocks for tiles of rows: forward, and dq of the backward.

A program goes once through the blocks that any row of its tile lists (backward_plan.TileLists), under one unit of heads
(a KV head, or a query head where lists belong to these). Neighbouring rows list many of the same blocks, so a block is
read for several rows at once, and their query heads fill a tile of the tensor cores. Rows whose list overflowed attend
to their dense span after that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.attend.triton_backward_kernels import keys_at, numbers_of, of_rows, row_gradients, scaled, tile_of
from longreach.ops.attend.triton_merging import LN2, LOG2E


@triton.jit
def _begin(
    rows, lists, number, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, M: tl.constexpr
):
    """Row, head, visible slots and whether the list overflowed, [M] each; sequence; keys to go through beyond lists."""
    seq_of, seen_of, table = rows
    counts = lists
    unit = tl.program_id(1)
    row, head = tile_of(tl.program_id(0), table, unit, T, WIDTH, M)
    there = row >= 0
    seen = tl.load(seen_of + row, mask=there, other=0)
    seq = tl.max(tl.load(seq_of + row, mask=there, other=0), 0)
    mine = tl.load(number + row.to(tl.int64) * A + unit, mask=there, other=0)
    over = (tl.load(counts + mine, mask=there, other=0) > C) & there
    return row, head, seen, over, seq, tl.max(tl.where(over, seen, 0), 0)


@triton.jit
def _round(
    i, chosen, at, seen, over, rounds, BLOCK: tl.constexpr, SUBS: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Slots [BN] of round i, whether they are read, and which rows take them [M, BN]."""
    n = tl.arange(0, BN)
    blocks, masks = chosen
    listed = i < rounds
    c, sub = i // SUBS, i % SUBS
    block = tl.load(blocks + at * (T * C) + c, mask=listed, other=0)
    mask = tl.load(masks + at * (T * C) + c, mask=listed, other=0)
    within = sub * BN + n
    slot = tl.where(listed, block * BLOCK + within, (i - rounds) * BN + n)
    mine = tl.where(listed, ((mask >> (tl.arange(0, M) // WIDTH)) & 1) != 0, over)
    take = mine[:, None] & (slot[None, :] < seen[:, None]) & ((within < BLOCK) | ~listed)[None, :]
    return slot, tl.max(take.to(tl.int32), 0) > 0, take


@triton.jit
def tiles_forward(
    q_of, q_strides, rows, memory, chosen, counts_of, lists, number, out, lse, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [R, H, D], lse [R, H], fp32. rows: (seq, seen, table of tiles); chosen: (blocks, masks) [tiles, A, T C];
    counts_of [tiles, A]; lists: counts of the rows' own lists; number int32 [R, A]."""
    k_of, k_strides, v_of, v_strides = memory
    row, head, seen, over, seq, dense = _begin(rows, lists, number, A, C, WIDTH, T, M)
    g = tl.program_id(1) * WIDTH // GROUP
    d = tl.arange(0, BD)
    q = of_rows(q_of, row, head, d, q_strides[0], q_strides[1], D)
    at = tl.program_id(0).to(tl.int64) * A + tl.program_id(1)
    rounds = tl.load(counts_of + at) * SUBS
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BD), tl.float32)
    for i in tl.range(0, rounds + (dense + BN - 1) // BN, num_stages=STAGES):
        slot, column, take = _round(i, chosen, at, seen, over, rounds, BLOCK, SUBS, C, T, WIDTH, M, BN)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        x, _ = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
        x = tl.where(take, x * LOG2E, float("-inf"))
        high = tl.maximum(peak, tl.max(x, 1))
        base = tl.where(high == float("-inf"), 0.0, high)
        p = tl.exp2(x - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = high
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    there = row >= 0
    to = row.to(tl.int64) * heads + head
    tl.store(lse + to, tl.where(none, float("-inf"), (peak + tl.log2(total)) * LN2), mask=there)
    tl.store(out + to[:, None] * D + d[None, :], acc / total[:, None], mask=there[:, None] & (d < D)[None, :])


@triton.jit
def tiles_dq(
    q_of, q_strides, rows, memory, chosen, counts_of, lists, number, results, dq, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq [R, H, D]. results: (lse, delta [R, H], dout [R, H, D] with the dtype of q)."""
    k_of, k_strides, v_of, v_strides = memory
    lse_of, delta_of, do_of = results
    row, head, seen, over, seq, dense = _begin(rows, lists, number, A, C, WIDTH, T, M)
    g = tl.program_id(1) * WIDTH // GROUP
    d = tl.arange(0, BD)
    q = of_rows(q_of, row, head, d, q_strides[0], q_strides[1], D)
    do = of_rows(do_of, row, head, d, heads * D, D, D)
    lse, delta = numbers_of(lse_of, row, head, heads), numbers_of(delta_of, row, head, heads)
    at = tl.program_id(0).to(tl.int64) * A + tl.program_id(1)
    rounds = tl.load(counts_of + at) * SUBS
    acc = tl.zeros((M, BD), tl.float32)
    for i in tl.range(0, rounds + (dense + BN - 1) // BN, num_stages=STAGES):
        slot, column, take = _round(i, chosen, at, seen, over, rounds, BLOCK, SUBS, C, T, WIDTH, M, BN)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        _, dx = row_gradients(q, do, k, v, 0.0, lse, delta, take, scale, cap, CAPPED)
        acc = tl.dot(dx.to(q.dtype), k, acc, input_precision="ieee")
    to = row.to(tl.int64)[:, None] * (heads * D) + head[:, None] * D + d[None, :]
    tl.store(dq + to, (acc * scale).to(dq.dtype.element_ty), mask=(row >= 0)[:, None] & (d < D)[None, :])
