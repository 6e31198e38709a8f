# mypy: ignore-errors
"""The Triton kernels of attention over lists of blocks, block by block: forward, and what the backward shares.

A pair is one entry of one list: a row and its query heads of one unit (a KV head, or a query head where lists belong to
these), and a block that the list names. Pairs are sorted by block, so a block's keys and values are read once for many
rows, which fill tiles of the tensor cores however different their lists are. Each pair leaves a part of its row's
result, and a second kernel puts the parts of a row together. No atomics: the same bits at each launch.

A program takes `size` consecutive pairs, so that blocks which many rows list are shared among programs.

Pairs are taken in chunks of some rows and A units, from `unit` on. Pair n of a chunk: entry n % C of the list of row
n // (A C) and unit `unit` + n // C % A. SUBS parts of BN keys a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.attend.triton_backward_kernels import FAR, keys_at, of_rows, scaled
from longreach.ops.attend.triton_merging import LN2, LOG2E


@triton.jit
def pair_keys(
    lists, seq_of, seen_of, keys, pairs, unit, kv_heads, blocks, most, A: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """keys int32 [pairs]: sequence, KV head and block of each pair as one number; `most` where there is none."""
    index, counts, number = lists
    n = tl.program_id(0) * N + tl.arange(0, N)
    there = n < pairs
    row, c = n // (A * C), n % C
    mine = tl.load(number + n // C, mask=there, other=0).to(tl.int64)
    used = tl.load(counts + mine, mask=there, other=0)
    there = there & (c < used) & (used <= C)
    block = tl.load(index + mine * C + c, mask=there, other=-1).to(tl.int64)
    there = there & (block >= 0) & (block * BLOCK < tl.load(seen_of + row, mask=there, other=0))
    seq = tl.load(seq_of + row, mask=there, other=0).to(tl.int32)
    g = (unit + n // C % A) * WIDTH // GROUP
    key = (seq * kv_heads + g) * blocks + block.to(tl.int32)
    tl.store(keys + n, tl.where(there, key, most), mask=n < pairs)


@triton.jit
def segment(keys, first, order, seen_of, at, stop_all, kv_heads, blocks, A: tl.constexpr, C: tl.constexpr):
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
def pairs_at(order, i, stop, m, seen_of, unit, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr):
    """Pair, row (-1 for none), query head and visible slots of each entry of a tile of T pairs, [M]."""
    near = (i + m // WIDTH < stop) & (m < T * WIDTH)
    pair = tl.load(order + i + m // WIDTH, mask=near, other=0).to(tl.int32)
    row = tl.where(near, pair // (A * C), -1)
    head = (unit + pair // C % A) * WIDTH + m % WIDTH
    return pair, row, head, tl.load(seen_of + row, mask=near, other=0)


@triton.jit
def pairs_forward(
    q_of, q_strides, seen_of, memory, pairs, parts, size, unit, kv_heads, blocks, most, scale, cap,
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
        key, stop, seq, g, block, high = segment(keys, first, order, seen_of, at, end, kv_heads, blocks, A, C)
        within = sub * BN + n
        slot = block * BLOCK + within
        column = (within < BLOCK) & (slot < high)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        for i in tl.range(at, stop, T, num_stages=STAGES):
            pair, row, head, seen = pairs_at(order, i, stop, m, seen_of, unit, A, C, WIDTH, T)
            q = of_rows(q_of, row, head, d, q_strides[0], q_strides[1], D)
            x, slope = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
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
def own_parts(
    lists, seen_of, i, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, SUBS: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """For this program's row and unit: of parts i to i + U, where they lie and which are there, [U WIDE]."""
    index, counts, number = lists
    mine = tl.load(number + tl.program_id(0)).to(tl.int64)
    used = tl.load(counts + mine)
    seen = tl.load(seen_of + tl.program_id(0) // A)
    m = tl.arange(0, U * WIDE)
    part = i + m // WIDE
    there = (m % WIDE < WIDTH) & (part < used * SUBS) & (used <= C)
    block = tl.load(index + mine * C + part // SUBS, mask=there, other=-1).to(tl.int64)
    there = there & (block >= 0) & (block * BLOCK < seen)
    return (tl.program_id(0).to(tl.int64) * C * SUBS + part) * WIDTH + m % WIDE, there


@triton.jit
def pairs_merge(
    seen_of, lists, parts, out, lse, first_unit, heads, A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr, U: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out [R, H, D], lse [R, H], fp32, from the parts, U at a time. Program (row and unit); WIDE: the power of two from
    WIDTH on. Where the list overflowed there are no parts: `over_forward` writes those."""
    out_of, lse_of = parts
    row, unit = tl.program_id(0) // A, first_unit + tl.program_id(0) % A
    w, d = tl.arange(0, WIDE), tl.arange(0, BD)
    peak = tl.full((WIDE,), float("-inf"), tl.float32)
    total = tl.zeros((WIDE,), tl.float32)
    acc = tl.zeros((WIDE, BD), tl.float32)
    for i in tl.static_range(0, C * SUBS, U):
        to, there = own_parts(lists, seen_of, i, A, C, WIDTH, WIDE, BLOCK, SUBS, U)
        x = tl.load(lse_of + to, mask=there, other=float("-inf")) * LOG2E
        both = there[:, None] & (d < D)[None, :]
        part = tl.load(out_of + to[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
        x = tl.reshape(x, (U, WIDE))
        high = tl.maximum(peak, tl.max(x, 0))
        base = tl.where(high == float("-inf"), 0.0, high)
        fade, size = tl.exp2(peak - base), tl.exp2(x - base[None, :])
        total = total * fade + tl.sum(size, 0)
        part = tl.reshape(part, (U, WIDE, BD)) * size[:, :, None]
        acc = acc * fade[:, None] + tl.sum(part, 0)
        peak = high
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    to = row.to(tl.int64) * heads + unit * WIDTH + w
    there = w < WIDTH
    tl.store(lse + to, tl.where(none, float("-inf"), (peak + tl.log2(total)) * LN2), mask=there)
    tl.store(out + to[:, None] * D + d[None, :], acc / total[:, None], mask=there[:, None] & (d < D)[None, :])


@triton.jit
def overflowed(lists, units, C: tl.constexpr, N: tl.constexpr):
    """Which of this program's N rows and units have lists that overflowed, and their numbers row * A + unit."""
    _, counts, number = lists
    n = tl.program_id(0) * N + tl.arange(0, N)
    mine = tl.load(number + n, mask=n < units, other=0).to(tl.int64)
    return (tl.load(counts + mine, mask=n < units, other=0) > C) & (n < units), n


@triton.jit
def next_of(
    left, number, seq_of, seen_of, m, A: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The first of those left: (the others, its row, query heads, KV head, sequence and visible slots)."""
    now = tl.min(tl.where(left, number, FAR), 0)
    row, unit = now // A, now % A
    seq, seen = tl.load(seq_of + row), tl.load(seen_of + row)
    return left & (number != now), row, unit * WIDTH + m, unit * WIDTH // GROUP, seq, seen


@triton.jit
def over_forward(
    q_of, q_strides, seq_of, seen_of, memory, lists, out, lse, units, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out, lse of rows and units whose lists overflowed: of their dense spans, one after another."""
    k_of, k_strides, v_of, v_strides = memory
    left, number = overflowed(lists, units, C, N)
    m, d, n = tl.arange(0, M), tl.arange(0, BD), tl.arange(0, BN)
    there = m < WIDTH
    while tl.max(left.to(tl.int32), 0) != 0:
        left, row, head, g, seq, seen = next_of(left, number, seq_of, seen_of, m, A, WIDTH, GROUP)
        q = of_rows(q_of, tl.where(there, row, -1), head, d, q_strides[0], q_strides[1], D)
        peak = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, BD), tl.float32)
        for at in range(0, seen, BN):
            slot = at + n
            column = slot < seen
            k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
            v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
            x, slope = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
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
        both = there[:, None] & (d < D)[None, :]
        tl.store(out + to[:, None] * D + d[None, :], acc / total[:, None], mask=both)
