# mypy: ignore-errors
"""The Triton kernel that ends score_and_pool, in the place of attend's merge_pieces. Logits and lse are in base 2."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.attend import triton_streams as streams
from longreach.ops.attend.triton_merging import LOG2E


@triton.jit
def _lse_of(item, m, there, items, programs, pieces, ends_at, MR: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr):
    """Maxima and sums [WIDE] of rows x heads m of an item, over its pieces, C at a time."""
    start = tl.load(ends_at + item - 1, mask=item > 0, other=0)
    end = tl.load(ends_at + item)
    whole = tl.maximum(tl.load(ends_at + items - 1), 1)
    share = tl.minimum(whole, programs)
    first = streams.holder(start, whole, share)
    count = tl.where(end > start, streams.holder(end - 1, whole, share) - first + 1, 0)
    peak = tl.full((WIDE,), float("-inf"), tl.float32)
    total = tl.zeros((WIDE,), tl.float32)
    c = tl.arange(0, C)
    for at in range(0, count, C):
        place = (first + item + at + c)[:, None] * MR + m[None, :]
        inside = (at + c < count)[:, None] & there[None, :]
        peaks = tl.load(pieces[0] + place, mask=inside, other=float("-inf"))
        totals = tl.load(pieces[1] + place, mask=inside, other=0.0)
        high = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(high == float("-inf"), 0.0, high)
        total = total * tl.exp2(peak - base) + tl.sum(totals * tl.exp2(peaks - base[None, :]), 0)
        peak = high
    return peak, total


@triton.jit
def pool_pieces(
    rows, result, items, programs, x_of, top_of, sink_of, filled_of, out_of, slots, blocks,
    layout: tl.constexpr, form: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    SUNK: tl.constexpr, DEALT: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row of an item, share): every share-th chunk of BN slots of those the row reaches.

    rows, result, layout, form: as in attend_pieces. x [R, G, slots, GROUP], top [R, G, blocks, GROUP] (BLOCK slots;
    HALVES, else x are natural logits and there is none), sink [H], out [R, G, slots]. WIDE: the power of two from GROUP
    on. DEALT: lse comes from pieces, else from the lse that attend_pieces has written.
    """
    _, lse_of, _, pieces, ends_at, heads, _ = result
    _, _, _, seq_of, pos_of, _, _ = rows
    T: tl.constexpr = layout[0]
    G: tl.constexpr = form[1]
    GROUP: tl.constexpr = form[2]
    EVICTED: tl.constexpr = form[4]
    item = tl.program_id(0) // T
    t = tl.program_id(0) % T
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = streams.row_of(item // G, t, rows, layout)
    if row >= 0:
        g = item % G
        reach = tl.load(filled_of + tl.load(seq_of + row)).to(tl.int32)
        if not EVICTED:
            reach = tl.minimum(reach, tl.load(pos_of + row) + 1).to(tl.int32)
        h = tl.arange(0, WIDE)
        mine = h < GROUP
        if DEALT:
            peak, total = _lse_of(item, t * GROUP + h, mine, items, programs, pieces, ends_at, T * GROUP, WIDE, C)
        else:
            peak = tl.load(lse_of + row * heads + g * GROUP + h, mask=mine, other=float("-inf")) * LOG2E
            total = tl.where(peak == float("-inf"), 0.0, 1.0)
        if SUNK:
            sink = tl.load(sink_of + g * GROUP + h, mask=mine, other=float("-inf")).to(tl.float32) * LOG2E
            high = tl.maximum(peak, sink)
            low = tl.where(high == float("-inf"), 0.0, high)
            total = total * tl.exp2(peak - low) + tl.exp2(sink - low)
            peak = high
        base = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), 0.0)
        # a chunk's logits lie side by side: flat, so that a thread loads as many bytes as it can
        flat = tl.arange(0, BN * WIDE)
        n = tl.arange(0, BN)
        stream = row.to(tl.int64) * G + g
        x_of += stream * slots * GROUP
        top_of += stream * blocks * GROUP
        for start in range(tl.program_id(1) * BN, reach, tl.num_programs(1) * BN):
            there = (start + n < reach)[:, None] & mine[None, :]
            if WIDE == GROUP:
                at_x = (tl.zeros((1,), tl.int64) + start) * GROUP + flat
                x = tl.load(x_of + at_x, mask=flat < tl.minimum(reach - start, BN) * GROUP, other=float("-inf"))
                x = tl.reshape(x, (BN, WIDE)).to(tl.float32)
            else:
                at_x = (start + n).to(tl.int64)[:, None] * GROUP + h[None, :]
                x = tl.load(x_of + at_x, mask=there, other=float("-inf")).to(tl.float32)
            if HALVES:
                at_top = ((start + n) // BLOCK)[:, None] * GROUP + h[None, :]
                x += tl.load(top_of + at_top, mask=there, other=0.0)
            else:
                x = x * LOG2E
            s = tl.sum(tl.exp2(x - base[None, :]), 1)
            tl.store(out_of + stream * slots + start + n, s, mask=start + n < reach)
