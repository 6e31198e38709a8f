# mypy: ignore-errors
"""The Triton kernels of across_heads. Logits: x [R, G, slots, GROUP] and top [R, G, blocks, GROUP], see ops.Logits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _natural(
    x_of, top_of, stream, n, reach, slots, blocks, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Logits [slots n, WIDE] of one row and KV head, -inf from reach on and past GROUP."""
    h = tl.arange(0, WIDE)[None, :]
    there = (n < reach)[:, None] & (h < GROUP)
    at = (stream * slots + n.to(tl.int64))[:, None] * GROUP + h
    x = tl.load(x_of + at, mask=there, other=float("-inf")).to(tl.float32)
    if HALVES:
        at_top = (stream * blocks + (n // BLOCK).to(tl.int64))[:, None] * GROUP + h
        x = (x + tl.load(top_of + at_top, mask=there, other=0.0)) * LN2
    return x


@triton.jit
def _reach(row, seq_of, pos_of, filled_of):
    """Slots that a row can see."""
    filled = tl.load(filled_of + tl.load(seq_of + row)).to(tl.int32)
    return tl.maximum(tl.minimum(filled, tl.load(pos_of + row) + 1), 0).to(tl.int32)


@triton.jit
def largest(
    x_of, top_of, seq_of, pos_of, filled_of, slots, blocks, lse_of, out_of,
    G: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, share): every share-th chunk of BN slots. lse [R, G * GROUP], out [R, slots]."""
    row = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    reach = _reach(row, seq_of, pos_of, filled_of)
    h = tl.arange(0, WIDE)
    for start in range(tl.program_id(1) * BN, reach, tl.num_programs(1) * BN):
        n = start + tl.arange(0, BN)
        best = tl.full((BN,), float("-inf"), tl.float32)
        for g in range(G):
            x = _natural(x_of, top_of, row * G + g, n, reach, slots, blocks, GROUP, WIDE, BLOCK, HALVES)
            lse = tl.load(lse_of + (row * G + g) * GROUP + h, mask=h < GROUP, other=0.0).to(tl.float32)
            best = tl.maximum(best, tl.max(x - lse[None, :], 1))
        tl.store(out_of + row * slots + n, best, mask=n < reach)


@triton.jit
def spread(
    x_of, top_of, seq_of, pos_of, filled_of, slots, blocks, count_of, recent_of, out_of, depth_of, scores_of, first,
    most, G: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, share): every share-th chunk of BN slots. out [R, G * GROUP, slots]."""
    stream = tl.program_id(0).to(tl.int64)
    row, g = stream // G, stream % G
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    reach = _reach(row, seq_of, pos_of, filled_of)
    recent = tl.load(recent_of + row).to(tl.int32)
    h = tl.arange(0, WIDE)
    if tl.program_id(1) == 0:
        count = tl.minimum(tl.load(count_of + row), most).to(tl.int32)
        others = tl.maximum(reach - recent - first, 0)
        depth = tl.minimum(tl.maximum(count - (reach - others), 0), others)
        tl.store(depth_of + stream * GROUP + h, depth + tl.zeros_like(h), mask=h < GROUP)
    for start in range(tl.program_id(1) * BN, reach, tl.num_programs(1) * BN):
        n = start + tl.arange(0, BN)
        late, early = n >= reach - recent, n < first
        x = _natural(x_of, top_of, stream, n, reach, slots, blocks, GROUP, WIDE, BLOCK, HALVES)
        x = tl.where((late | early)[:, None], float("-inf"), x)
        at = (stream * GROUP + h)[None, :] * slots + n[:, None]
        tl.store(out_of + at, x, mask=(n < reach)[:, None] & (h < GROUP)[None, :])
        if g == 0:
            score = tl.where(late, 2.0, tl.where(early, 1.0, float("-inf")))
            tl.store(scores_of + row * slots + n, score, mask=n < reach)


@triton.jit
def rank(
    x_of, scores_of, index, used, slots, capacity, mine, first_head, heads, BI: tl.constexpr, BJ: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and head, share): ranks of every share-th BI keys of a list, each compared with all of the list.

    Lists ascend, so of two equal keys the earlier entry comes first.
    """
    line = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.minimum(tl.load(used + line), capacity)
    index += line * capacity
    x_of += line * slots
    for start in range(tl.program_id(1) * BI, count, tl.num_programs(1) * BI):
        i = start + tl.arange(0, BI)
        slot = tl.load(index + i, mask=i < count, other=0)
        x = tl.load(x_of + slot, mask=i < count, other=float("-inf"))[:, None]
        ahead = tl.zeros((BI,), tl.int32)
        for at in range(0, count, BJ):
            j = at + tl.arange(0, BJ)
            other = tl.load(index + j, mask=j < count, other=0)
            y = tl.load(x_of + other, mask=j < count, other=float("nan"))[None, :]  # past the list: before no key
            if at + BJ <= start:
                before = y >= x
            elif at >= start + BI:
                before = y > x
            else:
                before = (y > x) | ((y == x) & (j[None, :] < i[:, None]))
            ahead += tl.sum(before.to(tl.int32), 1)
        turn = ahead * heads + first_head + (line % mine).to(tl.int32)
        tl.atomic_max(scores_of + line // mine * slots + slot, -turn.to(tl.float32), mask=i < count, sem="relaxed")
