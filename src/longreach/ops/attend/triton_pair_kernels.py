# mypy: ignore-errors
"""The Triton kernels of attention over lists of blocks, block by block: forward and backward.

A pair is one entry of one list: a row and its query heads of one unit (a KV head, or a query head where lists belong to
these), and a block that the list names. Pairs are sorted by block, so a block's keys and values are read once for many
rows, which fill tiles of the tensor cores however different their lists are. Each pair leaves a part of its row's
result, and a second kernel puts the parts of a row together. No atomics: the same bits at each launch.

A program takes `size` consecutive pairs, so that blocks which many rows list are shared among programs. A block whose
pairs are all of one program gets its gradient there; of others each program leaves a part, at 2 p where the block goes
on from the program before, else at 2 p + 1, which `blocks_sum` adds in order.

Pair n of a chunk of rows: entry n % C of the list of row n // (A C), unit n // C % A. SUBS parts of BN keys a block.
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
    scaled,
    weights_of,
)
from longreach.ops.attend.triton_merging import LN2, LOG2E


@triton.jit
def pair_keys(
    lists, seq_of, seen_of, keys, pairs, kv_heads, blocks, most, A: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """keys int32 [pairs]: sequence, KV head and block of each pair as one number; `most` where there is none."""
    index, counts, number = lists
    n = tl.program_id(0) * N + tl.arange(0, N)
    there = n < pairs
    row, unit, c = n // (A * C), n // C % A, n % C
    mine = tl.load(number + n // C, mask=there, other=0).to(tl.int64)
    used = tl.load(counts + mine, mask=there, other=0)
    there = there & (c < used) & (used <= C)
    block = tl.load(index + mine * C + c, mask=there, other=-1).to(tl.int64)
    there = there & (block >= 0) & (block * BLOCK < tl.load(seen_of + row, mask=there, other=0))
    seq = tl.load(seq_of + row, mask=there, other=0).to(tl.int32)
    key = (seq * kv_heads + unit * WIDTH // GROUP) * blocks + block.to(tl.int32)
    tl.store(keys + n, tl.where(there, key, most), mask=n < pairs)


@triton.jit
def _segment(keys, first, order, seen_of, at, stop_all, kv_heads, blocks, A: tl.constexpr, C: tl.constexpr):
    """The block of the pair at `at`: (key, end of its pairs, sequence, KV head, block, slots that some row sees)."""
    key = tl.load(keys + at)
    stop = tl.minimum(stop_all, tl.load(first + key + 1))
    most = tl.full((128,), 0, tl.int32)
    n = tl.arange(0, 128)
    for i in range(at, stop, 128):
        pair = tl.load(order + i + n, mask=i + n < stop, other=0).to(tl.int32)
        most = tl.maximum(most, tl.load(seen_of + pair // (A * C), mask=i + n < stop, other=0))
    return key, stop, key // blocks // kv_heads, key // blocks % kv_heads, key % blocks, tl.max(most, 0)


@triton.jit
def _pairs(order, i, stop, m, seen_of, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr):
    """Pair, row (-1 for none), query head and visible slots of each entry of a tile of T pairs, [M]."""
    near = (i + m // WIDTH < stop) & (m < T * WIDTH)
    pair = tl.load(order + i + m // WIDTH, mask=near, other=0).to(tl.int32)
    row = tl.where(near, pair // (A * C), -1)
    return pair, row, pair // C % A * WIDTH + m % WIDTH, tl.load(seen_of + row, mask=near, other=0)


@triton.jit
def pairs_forward(
    q_of, q_strides, seen_of, memory, pairs, parts, size, kv_heads, blocks, most, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr,
    CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (share of the pairs, part of their blocks). pairs: (keys, order, first). parts: (out [pairs, SUBS, WIDTH,
    D] with the dtype of q, lse fp32 [pairs, SUBS, WIDTH])."""
    k_of, k_strides, v_of, v_strides = memory
    keys, order, first = pairs
    out_of, lse_of = parts
    sub = tl.program_id(1)
    m, d, n = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BN)
    at = tl.program_id(0) * size
    end = tl.minimum(at + size, tl.load(first + most))
    while at < end:
        _, stop, seq, g, block, high = _segment(keys, first, order, seen_of, at, end, kv_heads, blocks, A, C)
        within = sub * BN + n
        slot = block * BLOCK + within
        column = (within < BLOCK) & (slot < high)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        for i in tl.range(at, stop, T, num_stages=STAGES):
            pair, row, head, seen = _pairs(order, i, stop, m, seen_of, A, C, WIDTH, T)
            q = of_rows(q_of, row, head, d, q_strides[0], q_strides[1], D)
            x, _ = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
            take = column[None, :] & (slot[None, :] < seen[:, None])
            x = tl.where(take, x * LOG2E, float("-inf"))
            peak = tl.max(x, 1)
            base = tl.where(peak == float("-inf"), 0.0, peak)
            p = tl.exp2(x - base[:, None])
            total = tl.sum(p, 1)
            none = total == 0.0
            total = tl.where(none, 1.0, total)
            acc = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total[:, None]
            to = (pair.to(tl.int64) * SUBS + sub) * WIDTH + m % WIDTH
            tl.store(lse_of + to, tl.where(none, float("-inf"), (peak + tl.log2(total)) * LN2), mask=row >= 0)
            there = (row >= 0)[:, None] & (d < D)[None, :]
            tl.store(out_of + to[:, None] * D + d[None, :], acc.to(out_of.dtype.element_ty), mask=there)
        at = stop


@triton.jit
def _own(lists, seq_of, seen_of, A: tl.constexpr, C: tl.constexpr):
    """This program's row and unit: (row, unit, list, sequence, visible slots, entries, slots to attend to densely)."""
    _, counts, number = lists
    row, unit = tl.program_id(0) // A, tl.program_id(0) % A
    mine = tl.load(number + tl.program_id(0)).to(tl.int64)
    used = tl.load(counts + mine).to(tl.int32)
    seen = tl.load(seen_of + row)
    over = used > C
    return row, unit, mine, tl.load(seq_of + row), seen, tl.where(over, 0, used), tl.where(over, seen, 0)


@triton.jit
def _listed(lists, mine, c, seen, C: tl.constexpr, BLOCK: tl.constexpr):
    """Whether entry c of a list is a pair."""
    block = tl.load(lists[0] + mine * C + c).to(tl.int64)
    return (block >= 0) & (block * BLOCK < seen)


@triton.jit
def pairs_merge(
    q_of, q_strides, seq_of, seen_of, memory, lists, parts, out, lse, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, CAPPED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out [R, H, D], lse [R, H], fp32. Program (row and unit): its parts, or its dense span where its list overflowed."""
    k_of, k_strides, v_of, v_strides = memory
    out_of, lse_of = parts
    row, unit, mine, seq, seen, used, dense = _own(lists, seq_of, seen_of, A, C)
    m, d, n = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BN)
    there = m < WIDTH
    both = there[:, None] & (d < D)[None, :]
    head = unit * WIDTH + m
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BD), tl.float32)
    for i in range(used * SUBS):
        listed = _listed(lists, mine, i // SUBS, seen, C, BLOCK)
        to = (tl.program_id(0).to(tl.int64) * C * SUBS + i) * WIDTH + m
        x = tl.load(lse_of + to, mask=there & listed, other=float("-inf")) * LOG2E
        part = tl.load(out_of + to[:, None] * D + d[None, :], mask=both & listed, other=0.0).to(tl.float32)
        high = tl.maximum(peak, x)
        base = tl.where(high == float("-inf"), 0.0, high)
        fade, size = tl.exp2(peak - base), tl.exp2(x - base)
        total = total * fade + size
        acc = acc * fade[:, None] + part * size[:, None]
        peak = high
    if dense > 0:
        q = of_rows(q_of, tl.where(there, row, -1), head, d, q_strides[0], q_strides[1], D)
        for at in range(0, dense, BN):
            slot = at + n
            column = slot < dense
            k = keys_at(k_of, seq, unit * WIDTH // GROUP, slot, column, d, k_strides, D)
            v = keys_at(v_of, seq, unit * WIDTH // GROUP, slot, column, d, v_strides, D)
            x, _ = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
            x = tl.where(column[None, :], x * LOG2E, float("-inf"))
            high = tl.maximum(peak, tl.max(x, 1))
            fade, p = tl.exp2(peak - high), tl.exp2(x - high[:, None])
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            peak = high
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    to = row.to(tl.int64) * heads + head
    tl.store(lse + to, tl.where(none, float("-inf"), (peak + tl.log2(total)) * LN2), mask=there)
    tl.store(out + to[:, None] * D + d[None, :], acc / total[:, None], mask=both)


@triton.jit
def _add(to, offset, x, mask):
    tl.store(to + offset, (tl.load(to + offset, mask=mask, other=0.0) + x).to(to.dtype.element_ty), mask=mask)


@triton.jit
def pairs_backward(
    q_of, q_strides, seen_of, memory, pairs, results, dq_parts, dk_of, dv_of, strides, work, size, heads, kv_heads,
    blocks, most, slots, scale, cap, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr,
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
        key, stop, seq, g, block, high = _segment(keys, first, order, seen_of, at, end, kv_heads, blocks, A, C)
        within = sub * BN + n
        slot = block * BLOCK + within
        column = (within < BLOCK) & (slot < high)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        dk = tl.zeros((BN, BD), tl.float32)
        dv = tl.zeros((BN, BD), tl.float32)
        for i in tl.range(at, stop, T, num_stages=STAGES):
            pair, row, head, seen = _pairs(order, i, stop, m, seen_of, A, C, WIDTH, T)
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
        place = p.to(tl.int64) * 2 + ((p == low) & (begin % size != 0)).to(tl.int64)
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
    q_of, q_strides, seq_of, seen_of, memory, lists, results, dq_parts, dq, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, CAPPED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dq [R, H, D]. Program (row and unit): the sum of its parts, or that of its dense span."""
    k_of, k_strides, v_of, v_strides = memory
    lse_of, delta_of, do_of = results
    row, unit, mine, seq, seen, used, dense = _own(lists, seq_of, seen_of, A, C)
    m, d, n = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BN)
    there = m < WIDTH
    both = there[:, None] & (d < D)[None, :]
    head = unit * WIDTH + m
    acc = tl.zeros((M, BD), tl.float32)
    for i in range(used * SUBS):
        listed = _listed(lists, mine, i // SUBS, seen, C, BLOCK)
        to = (tl.program_id(0).to(tl.int64) * C * SUBS + i) * WIDTH + m
        acc += tl.load(dq_parts + to[:, None] * D + d[None, :], mask=both & listed, other=0.0).to(tl.float32)
    if dense > 0:
        wide = tl.where(there, row, -1)
        q = of_rows(q_of, wide, head, d, q_strides[0], q_strides[1], D)
        do = of_rows(do_of, wide, head, d, heads * D, D, D)
        lse, delta = numbers_of(lse_of, wide, head, heads), numbers_of(delta_of, wide, head, heads)
        for at in range(0, dense, BN):
            slot = at + n
            column = slot < dense
            k = keys_at(k_of, seq, unit * WIDTH // GROUP, slot, column, d, k_strides, D)
            v = keys_at(v_of, seq, unit * WIDTH // GROUP, slot, column, d, v_strides, D)
            take = column[None, :] & there[:, None]
            _, dx = row_gradients(q, do, k, v, 0.0, lse, delta, take, scale, cap, CAPPED)
            acc = tl.dot(dx.to(q.dtype), k, acc, input_precision="ieee")
    to = row.to(tl.int64) * heads + head
    tl.store(dq + to[:, None] * D + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=both)
