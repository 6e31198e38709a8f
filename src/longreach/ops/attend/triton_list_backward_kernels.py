# mypy: ignore-errors
"""The Triton kernels of attend's backward over lists of blocks.

A *pair* is an entry of a row's list: pair (r A + a) C + c is entry c of the list that row r uses with unit a. Units are
KV heads, or query heads where lists belong to these: A of them, of WIDTH query heads. Pairs are sorted by the block of
keys that they name, so that one program sums a block's gradients over all of them, in order. A row whose list
overflowed attends to its dense span: its dq is computed here, its part of dk and dv as that of a span.

A block of BLOCK keys is computed in SUBS parts of up to BN keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.attend.triton_backward_kernels import key_gradients, keys_at, numbers_of, of_rows, row_gradients


@triton.jit
def lists_dq(
    rows, memory, lists, results, dq, dw, heads, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, WEIGHTED: tl.constexpr, LEARNT: tl.constexpr, CAPPED: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq [R, H, D], and (LEARNT) dw [R A C, SUBS], the gradient of each pair's log-weight.

    rows: (q, row and head stride, seq, seen), seen int32 [R] the slots visible to a row; lists: (index, count,
    log_weight, number), number int32 [R A] of the list that a row uses.
    """
    q_of, q_row, q_head, seq_of, seen_of = rows
    k_of, k_strides, v_of, v_strides = memory
    index, counts, weight, number = lists
    lse_of, delta_of, do_of = results
    r, a = tl.program_id(0) // A, tl.program_id(0) % A
    m = tl.arange(0, M)
    row = tl.where(m < WIDTH, r, -1)
    head = a * WIDTH + m % WIDTH
    g = a * WIDTH // GROUP
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    q = of_rows(q_of, row, head, d, q_row, q_head, D)
    do = of_rows(do_of, row, head, d, heads * D, D, D)
    lse, delta = numbers_of(lse_of, row, head, heads), numbers_of(delta_of, row, head, heads)
    seq, seen = tl.load(seq_of + r), tl.load(seen_of + r)
    mine = tl.load(number + tl.program_id(0)).to(tl.int64)
    used = tl.load(counts + mine).to(tl.int32)
    over = used > C
    rounds = tl.where(over, (seen + BN - 1) // BN, used * SUBS)
    acc = tl.zeros((M, BD), tl.float32)
    for i in tl.range(0, rounds, num_stages=STAGES):
        c, sub = i // SUBS, i % SUBS
        block = tl.load(index + mine * C + c, mask=~over, other=0).to(tl.int32)
        slot = tl.where(over, i * BN, block * BLOCK + sub * BN) + n
        column = (slot < seen) & (slot >= 0) & (over | (sub * BN + n < BLOCK))
        log_weight = 0.0
        if WEIGHTED:
            log_weight = tl.load(weight + mine * C + c, mask=~over, other=0.0).to(tl.float32)
        k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
        v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
        take = column[None, :] & (m < WIDTH)[:, None]
        dx, slanted = row_gradients(q, do, k, v, log_weight, lse, delta, take, scale, cap, CAPPED)
        acc = tl.dot(slanted.to(q.dtype), k, acc, input_precision="ieee")
        if LEARNT:
            to = (tl.program_id(0).to(tl.int64) * C + c) * SUBS + sub
            tl.store(dw + to, tl.sum(tl.sum(dx, 1), 0), mask=~over)
    to = row.to(tl.int64)[:, None] * (heads * D) + head[:, None] * D + d[None, :]
    tl.store(dq + to, (acc * scale).to(dq.dtype.element_ty), mask=(row >= 0)[:, None] & (d < D)[None, :])


@triton.jit
def lists_dkv(
    rows, memory, lists, pairs, results, dk_of, dv_of, strides, heads, kv_heads, blocks, slots, scale, cap,
    A: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr,
    WEIGHTED: tl.constexpr, CAPPED: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to dk, dv [B, G, slots, D] of one part of a block. pairs: (order int32, first int32 [B G blocks + 1]): pairs
    order[first[i] : first[i + 1]] name block i."""
    q_of, q_row, q_head, _, seen_of = rows
    k_of, k_strides, v_of, v_strides = memory
    _, _, weight, number = lists
    lse_of, delta_of, do_of = results
    order, first = pairs
    sub, block = tl.program_id(0) % SUBS, tl.program_id(0) // SUBS % blocks
    seq, g = tl.program_id(0) // SUBS // blocks, tl.program_id(1)
    within = sub * BN + tl.arange(0, BN)
    slot = block * BLOCK + within
    at = (seq * kv_heads + g) * blocks + block
    begin, end = tl.load(first + at), tl.load(first + at + 1)
    m = tl.arange(0, M)
    d = tl.arange(0, BD)
    column = (within < BLOCK) & (slot < slots) & (begin < end)
    k = keys_at(k_of, seq, g, slot, column, d, k_strides, D)
    v = keys_at(v_of, seq, g, slot, column, d, v_strides, D)
    to = seq.to(tl.int64) * strides[0] + g.to(tl.int64) * strides[1] + slot.to(tl.int64)[:, None] * D + d[None, :]
    there = column[:, None] & (d < D)[None, :]
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    for i in tl.range(begin, end, T, num_stages=STAGES):
        near = (i + m // WIDTH < end) & (m < T * WIDTH)
        pair = tl.load(order + i + m // WIDTH, mask=near, other=0)
        row = tl.where(near, pair // (A * C), -1)
        unit = pair // C % A
        head = unit * WIDTH + m % WIDTH
        seen = tl.load(seen_of + row, mask=near, other=0)
        log_weight = 0.0
        if WEIGHTED:
            mine = tl.load(number + pair // C, mask=near, other=0).to(tl.int64)
            log_weight = tl.load(weight + mine * C + pair % C, mask=near, other=0.0).to(tl.float32)[None, :]
        take = column[:, None] & (slot[:, None] < seen[None, :])
        q = of_rows(q_of, row, head, d, q_row, q_head, D)
        do = of_rows(do_of, row, head, d, heads * D, D, D)
        lse, delta = numbers_of(lse_of, row, head, heads), numbers_of(delta_of, row, head, heads)
        dk, dv = key_gradients(dk, dv, q, do, k, v, log_weight, lse, delta, take, scale, cap, CAPPED)
    dk = dk * scale + tl.load(dk_of + to, mask=there, other=0.0).to(tl.float32)
    dv += tl.load(dv_of + to, mask=there, other=0.0).to(tl.float32)
    tl.store(dk_of + to, dk.to(dk_of.dtype.element_ty), mask=there)
    tl.store(dv_of + to, dv.to(dv_of.dtype.element_ty), mask=there)
