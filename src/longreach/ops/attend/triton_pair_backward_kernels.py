# mypy: ignore-errors
"""The Triton kernels of the backward of attention over lists of blocks, block by block (see triton_pair_kernels).

A block whose pairs are all of one program gets its gradient there. Of others each program leaves a part, at 2 p where
the block goes on from the program before, else at 2 p + 1, and `blocks_sum` adds them in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.attend.triton_backward_kernels import (
    key_gradients,
    keys_at,
    numbers_of,
    of_rows,
    row_gradients,
    weights_of,
)
from longreach.ops.attend.triton_pair_kernels import next_of, overflowed, own_parts, pairs_at, segment


@triton.jit
def _add(to, offset, x, mask):
    tl.store(to + offset, (tl.load(to + offset, mask=mask, other=0.0) + x).to(to.dtype.element_ty), mask=mask)


@triton.jit
def pairs_backward(
    q_of, q_strides, seen_of, memory, pairs, results, dq_parts, dk_of, dv_of, strides, work, size, unit, heads,
    kv_heads, blocks, most, slots, scale, cap, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SUBS: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (share of the pairs, part of their blocks). dq_parts [pairs, SUBS, WIDTH, D], without the scale; dk, dv
    [B, G, slots, D], to which whole blocks are added; work fp32 [2 programs, SUBS, 2, BN, D], parts of the others."""
    k_of, k_strides, v_of, v_strides = memory
    keys, order, first = pairs
    lse_of, delta_of, do_of = results
    sub = tl.program_id(1)
    m, d, n = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BN)
    begin = tl.program_id(0) * size
    end = tl.minimum(begin + size, tl.load(first + most))
    at = begin
    while at < end:
        key, stop, seq, g, block, high = segment(keys, first, order, seen_of, at, end, kv_heads, blocks, A, C)
        within = sub * BN + n
        slot = block * BLOCK + within
        column = (within < BLOCK) & (slot < high)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        dk = tl.zeros((BN, BD), tl.float32)
        dv = tl.zeros((BN, BD), tl.float32)
        for i in tl.range(at, stop, T, num_stages=STAGES):
            pair, row, head, seen = pairs_at(order, i, stop, m, seen_of, unit, A, C, WIDTH, T)
            q = of_rows(q_of, row, head, d, q_strides[0], q_strides[1], D)
            do = of_rows(do_of, row, head, d, heads * D, D, D)
            lse, delta = numbers_of(lse_of, row, head, heads), numbers_of(delta_of, row, head, heads)
            take = column[:, None] & (slot[:, None] < seen[None, :])
            products = tl.dot(k, tl.trans(q), input_precision="ieee")
            p, slope = weights_of(products, 0.0, lse[None, :], take, scale, cap, CAPPED)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            dx = tl.where(take, p * (dp - delta[None, :]) * slope, 0.0).to(q.dtype)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            dk = tl.dot(dx, q, dk, input_precision="ieee")
            dq = tl.dot(tl.trans(dx), k, input_precision="ieee")
            to = (pair.to(tl.int64) * SUBS + sub) * WIDTH + m % WIDTH
            there = (row >= 0)[:, None] & (d < D)[None, :]
            tl.store(dq_parts + to[:, None] * D + d[None, :], dq.to(dq_parts.dtype.element_ty), mask=there)
        dk *= scale
        whole = (at == tl.load(first + key)) & (stop == tl.load(first + key + 1))
        there = column[:, None] & (d < D)[None, :]
        to = seq.to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1] + slot.to(tl.int64)[:, None] * D + d[None, :]
        _add(dk_of, to, dk, there & whole)
        _add(dv_of, to, dv, there & whole)
        place = tl.program_id(0).to(tl.int64) * 2 + (at != begin).to(tl.int64)
        to = (place * SUBS + sub) * (2 * BN * D) + n[:, None] * D + d[None, :]
        there = ((within < BLOCK) & ~whole)[:, None] & (d < D)[None, :]
        tl.store(work + to, dk, mask=there)
        tl.store(work + to + BN * D, dv, mask=there)
        at = stop


@triton.jit
def blocks_sum(
    q_of, q_strides, seq_of, seen_of, memory, first, work, over, results, dk_of, dv_of, strides, size, heads, kv_heads,
    blocks, slots, scale, cap, A: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, OVER: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to dk, dv of one part of a block what several programs found, and, if OVER, what rows do whose lists
    overflowed. over: (their numbers row * A + unit, how many); rows and results are then those of all rows."""
    at, sub = tl.program_id(0) // SUBS, tl.program_id(0) % SUBS
    d, n = tl.arange(0, BD), tl.arange(0, BN)
    begin, end = tl.load(first + at), tl.load(first + at + 1)
    low, high = begin // size, (end - 1) // size
    spread = (begin < end) & (low < high)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    within = sub * BN + n
    block, g, seq = at % blocks, at // blocks % kv_heads, at // blocks // kv_heads
    slot = block * BLOCK + within
    column = (within < BLOCK) & (slot < slots)
    there = column[:, None] & (d < D)[None, :]
    for p in range(low, tl.where(spread, high + 1, low)):
        place = 2 * p + tl.where((p == low) & (begin % size != 0), 1, 0).to(tl.int64)
        to = (place * SUBS + sub) * (2 * BN * D) + n[:, None] * D + d[None, :]
        dk += tl.load(work + to, mask=there, other=0.0)
        dv += tl.load(work + to + BN * D, mask=there, other=0.0)
    any_over = False
    if OVER:
        k_of, k_strides, v_of, v_strides = memory
        lse_of, delta_of, do_of = results
        count = tl.load(over[1])
        any_over = count > 0
        m = tl.arange(0, M)
        for i in range(0, count):
            number = tl.load(over[0] + i)
            row, unit = number // A, number % A
            mine = (tl.load(seq_of + row) == seq) & (unit * WIDTH // GROUP == g)
            seen = tl.where(mine, tl.load(seen_of + row), 0)
            if seen > block * BLOCK:
                some = column & (slot < seen)
                k = keys_at(k_of, seq, g, slot, some, d, k_strides, D)
                v = keys_at(v_of, seq, g, slot, some, d, v_strides, D)
                wide = tl.where(m < WIDTH, row, -1)
                head = unit * WIDTH + m % WIDTH
                q = of_rows(q_of, wide, head, d, q_strides[0], q_strides[1], D)
                do = of_rows(do_of, wide, head, d, heads * D, D, D)
                lse, delta = numbers_of(lse_of, wide, head, heads), numbers_of(delta_of, wide, head, heads)
                take = some[:, None] & (m < WIDTH)[None, :]
                zero = tl.zeros((BN, BD), tl.float32)
                more_k, more_v = key_gradients(zero, zero, q, do, k, v, 0.0, lse, delta, take, scale, cap, CAPPED)
                dk += more_k * scale
                dv += more_v
    to = seq.to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1] + slot.to(tl.int64)[:, None] * D + d[None, :]
    _add(dk_of, to, dk, there & (spread | any_over))
    _add(dv_of, to, dv, there & (spread | any_over))


@triton.jit
def pairs_dq(
    seen_of, lists, dq_parts, dq, first_unit, heads, scale, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr, U: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dq [R, H, D], the sum of its parts; as `pairs_merge`."""
    row, unit = tl.program_id(0) // A, first_unit + tl.program_id(0) % A
    w, d = tl.arange(0, WIDE), tl.arange(0, BD)
    acc = tl.zeros((WIDE, BD), tl.float32)
    for i in tl.static_range(0, C * SUBS, U):
        to, there = own_parts(lists, seen_of, i, A, C, WIDTH, WIDE, BLOCK, SUBS, U)
        both = there[:, None] & (d < D)[None, :]
        part = tl.load(dq_parts + to[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
        acc += tl.sum(tl.reshape(part, (U, WIDE, BD)), 0)
    to = row.to(tl.int64) * heads + unit * WIDTH + w
    both = (w < WIDTH)[:, None] & (d < D)[None, :]
    tl.store(dq + to[:, None] * D + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=both)


@triton.jit
def over_dq(
    q_of, q_strides, seq_of, seen_of, memory, lists, results, dq, units, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dq of rows and units whose lists overflowed; as `over_forward`."""
    k_of, k_strides, v_of, v_strides = memory
    lse_of, delta_of, do_of = results
    left, number = overflowed(lists, units, C, N)
    m, d, n = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BN)
    there = m < WIDTH
    while tl.max(left.to(tl.int32), 0) != 0:
        left, row, head, g, seq, seen = next_of(left, number, seq_of, seen_of, m, A, WIDTH, GROUP)
        wide = tl.where(there, row, -1)
        q = of_rows(q_of, wide, head, d, q_strides[0], q_strides[1], D)
        do = of_rows(do_of, wide, head, d, heads * D, D, D)
        lse, delta = numbers_of(lse_of, wide, head, heads), numbers_of(delta_of, wide, head, heads)
        acc = tl.zeros((M, BD), tl.float32)
        for at in range(0, seen, BN):
            slot = at + n
            column = slot < seen
            k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
            v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
            take = column[None, :] & there[:, None]
            _, dx = row_gradients(q, do, k, v, 0.0, lse, delta, take, scale, cap, CAPPED)
            acc = tl.dot(dx.to(q.dtype), k, acc, input_precision="ieee")
        to = row.to(tl.int64) * heads + head
        both = there[:, None] & (d < D)[None, :]
        tl.store(dq + to[:, None] * D + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=both)
