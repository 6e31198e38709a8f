# mypy: ignore-errors
"""The Triton kernels of attend's backward over spans, and what they share with those over lists.

With x the logits, P = exp(x - lse), delta = sum_d dout out - dlse:

    dP = dout v^T    dx = P (dP - delta)    dq = scale dx k    dk = scale dx^T q    dv = P^T dout

One kernel goes through the keys of a tile of rows (dq), one through the rows of a block of keys (dk, dv). Each number
is written by one program, which sums in a fixed order: no atomics, and the same bits at each launch.

Sequence b lies in page b. M rows x heads of a tile (T rows, GROUP query heads of one KV head), BN keys of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.attend.triton_merging import LOG2E

FAR = tl.constexpr((1 << 30) - 1)


@triton.jit
def _tanh(x):
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def scaled(products, scale, cap, CAPPED: tl.constexpr):
    """Logits from products q.k, without log-weights, and their derivative in scale q.k."""
    slope = 1.0
    if CAPPED:
        t = _tanh(products * (scale / cap))
        x = cap * t
        slope = 1.0 - t * t
    else:
        x = products * scale
    return x, slope


@triton.jit
def weights_of(products, log_weight, lse, take, scale, cap, CAPPED: tl.constexpr):
    """P, and the derivative of the logit in scale q.k. Arguments of one shape, or that broadcast to it."""
    x, slope = scaled(products, scale, cap, CAPPED)
    x = x + log_weight - tl.where(lse == float("-inf"), 0.0, lse)
    return tl.where(take, tl.exp2(x * LOG2E), 0.0), slope


@triton.jit
def of_rows(x, row, head, d, row_stride, head_stride, D: tl.constexpr):
    """[M, BD] of queries, or of gradients of outputs; 0 for row -1 and past D."""
    at = row.to(tl.int64)[:, None] * row_stride + head.to(tl.int64)[:, None] * head_stride + d[None, :]
    return tl.load(x + at, mask=(row >= 0)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def numbers_of(x, row, head, heads):
    """[M] of lse or delta [R, H]; 0 for row -1."""
    return tl.load(x + row.to(tl.int64) * heads + head, mask=row >= 0, other=0.0)


@triton.jit
def keys_at(x, seq, g, slot, column, d, strides, D: tl.constexpr):
    """[BN, BD] of keys or values; 0 where not `column`, and past D."""
    base = x + seq.to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1]
    at = slot.to(tl.int64)[:, None] * strides[2] + d[None, :]
    return tl.load(base + at, mask=column[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def row_gradients(q, do, k, v, log_weight, lse, delta, take, scale, cap, CAPPED: tl.constexpr):
    """dx [M, BN] of the logits, and of scale q.k, for a tile of rows q, do [M, BD] and keys k, v [BN, BD]."""
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    p, slope = weights_of(products, log_weight, lse[:, None], take, scale, cap, CAPPED)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    dx = tl.where(take, p * (dp - delta[:, None]), 0.0)
    return dx, dx * slope


@triton.jit
def key_gradients(dk, dv, q, do, k, v, log_weight, lse, delta, take, scale, cap, CAPPED: tl.constexpr):
    """dk (without scale) and dv [BN, BD], with those of a tile of rows added. take: [BN, M]."""
    products = tl.dot(k, tl.trans(q), input_precision="ieee")
    p, slope = weights_of(products, log_weight, lse[None, :], take, scale, cap, CAPPED)
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    dx = tl.where(take, p * (dp - delta[None, :]) * slope, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(dx.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def deltas(
    out, dout, dlse, delta, rounded, count, ROUNDED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """delta [R H] from out, dout [R H, D] and dlse [R H], all contiguous; rounded: dout in the dtype of the queries."""
    m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    d = tl.arange(0, BD)
    both = (m < count)[:, None] & (d < D)[None, :]
    at = m[:, None] * D + d[None, :]
    x = tl.load(dout + at, mask=both, other=0.0)
    product = tl.sum(x * tl.load(out + at, mask=both, other=0.0), 1)
    tl.store(delta + m, product - tl.load(dlse + m, mask=m < count, other=0.0), mask=m < count)
    if ROUNDED:
        tl.store(rounded + at, x.to(rounded.dtype.element_ty), mask=both)


@triton.jit
def tile_of(tile, table, g, T: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Row (-1 for none) and query head of each entry of a tile, [M]."""
    m = tl.arange(0, M)
    row = tl.load(table + tile * T + m // GROUP, mask=m < T * GROUP, other=-1)
    return row, g * GROUP + m % GROUP


@triton.jit
def _span(limits, s: tl.constexpr, row, head, g, count, AXIS: tl.constexpr, PER_QUERY: tl.constexpr):
    """Slots [low, high) of span s for each row and head, [M]; empty ones are [0, 0)."""
    axis = tl.zeros_like(head)
    if AXIS > 1:
        axis = head if PER_QUERY else axis + g
    at = (s * count + row.to(tl.int64)) * AXIS + axis
    low = tl.load(limits[0] + at, mask=row >= 0, other=0)
    return low, tl.load(limits[1] + at, mask=row >= 0, other=0)


@triton.jit
def spans_dq(
    rows, memory, limits, results, dq, heads, count, scale, cap,
    SPANS: tl.constexpr, AXIS: tl.constexpr, PER_QUERY: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq [R, H, D]. rows: (q, row and head stride, seq, table); memory: (k, its strides, v, its strides); limits: (low,
    high) int32 [SPANS, R, AXIS]; results: (lse, delta [R, H], dout [R, H, D] with the dtype of q)."""
    q_of, q_row, q_head, seq_of, table = rows
    k_of, k_strides, v_of, v_strides = memory
    lse_of, delta_of, do_of = results
    g = tl.program_id(1)
    row, head = tile_of(tl.program_id(0), table, g, T, GROUP, M)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    q = of_rows(q_of, row, head, d, q_row, q_head, D)
    do = of_rows(do_of, row, head, d, heads * D, D, D)
    lse, delta = numbers_of(lse_of, row, head, heads), numbers_of(delta_of, row, head, heads)
    seq = tl.max(tl.load(seq_of + row, mask=row >= 0, other=0), 0)
    acc = tl.zeros((M, BD), tl.float32)
    lows, highs = (), ()
    for s in tl.static_range(SPANS):
        low, high = _span(limits, s, row, head, g, count, AXIS, PER_QUERY)
        begin = tl.min(tl.where(low < high, low, FAR), 0)
        end = tl.max(high, 0)
        for at in tl.range(begin, end, BN, num_stages=STAGES):
            slot = at + n
            take = (slot[None, :] >= low[:, None]) & (slot[None, :] < high[:, None])
            for earlier in tl.static_range(s):  # a key of two spans counts once
                take = take & ((slot[None, :] < lows[earlier][:, None]) | (slot[None, :] >= highs[earlier][:, None]))
            column = tl.max(take.to(tl.int32), 0) > 0
            k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
            v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
            _, dx = row_gradients(q, do, k, v, 0.0, lse, delta, take, scale, cap, CAPPED)
            acc = tl.dot(dx.to(q.dtype), k, acc, input_precision="ieee")
        lows, highs = lows + (low,), highs + (high,)
    to = row.to(tl.int64)[:, None] * (heads * D) + head[:, None] * D + d[None, :]
    tl.store(dq + to, (acc * scale).to(dq.dtype.element_ty), mask=(row >= 0)[:, None] & (d < D)[None, :])


@triton.jit
def spans_dkv(
    rows, memory, limits, ranges, results, dk_of, dv_of, strides, heads, count, sequences, blocks, slots, scale, cap,
    SPANS: tl.constexpr, AXIS: tl.constexpr, PER_QUERY: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk, dv [splits, B, G, slots, D] of one block of keys: sums over each of the grid's `splits` parts of its tiles.
    ranges: int32 [SPANS, B, blocks, 2], the tiles [first, stop) of which some row may see the block."""
    q_of, q_row, q_head, _, table = rows
    k_of, k_strides, v_of, v_strides = memory
    lse_of, delta_of, do_of = results
    seq, block, g = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    part, parts = tl.program_id(2), tl.num_programs(2)
    d = tl.arange(0, BD)
    slot = block * BN + tl.arange(0, BN)
    column = slot < slots
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    some = False
    for s in tl.static_range(SPANS):
        at = ((s * sequences + seq) * blocks + block) * 2
        some = some | (tl.load(ranges + at) < tl.load(ranges + at + 1))
    column = column & some
    k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
    v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
    for s in tl.static_range(SPANS):
        at = ((s * sequences + seq) * blocks + block) * 2
        first = tl.load(ranges + at)
        tiles = tl.maximum(tl.load(ranges + at + 1) - first, 0)
        begin, end = first + tiles * part // parts, first + tiles * (part + 1) // parts
        for tile in tl.range(begin, end, num_stages=STAGES):
            row, head = tile_of(tile, table, g, T, GROUP, M)
            low, high = _span(limits, s, row, head, g, count, AXIS, PER_QUERY)
            take = (slot[:, None] >= low[None, :]) & (slot[:, None] < high[None, :])
            for earlier in tl.static_range(s):
                low, high = _span(limits, earlier, row, head, g, count, AXIS, PER_QUERY)
                take = take & ((slot[:, None] < low[None, :]) | (slot[:, None] >= high[None, :]))
            q = of_rows(q_of, row, head, d, q_row, q_head, D)
            do = of_rows(do_of, row, head, d, heads * D, D, D)
            lse, delta = numbers_of(lse_of, row, head, heads), numbers_of(delta_of, row, head, heads)
            dk, dv = key_gradients(dk, dv, q, do, k, v, 0.0, lse, delta, take, scale, cap, CAPPED)
    to = (part * sequences + seq).to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1]
    to += slot.to(tl.int64)[:, None] * D + d[None, :]
    there = (slot < slots)[:, None] & (d < D)[None, :]
    tl.store(dk_of + to, (dk * scale).to(dk_of.dtype.element_ty), mask=there)
    tl.store(dv_of + to, dv.to(dv_of.dtype.element_ty), mask=there)
