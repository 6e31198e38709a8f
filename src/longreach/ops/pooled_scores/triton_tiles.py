# mypy: ignore-errors
"""The Triton kernel of pooled_scores by tile: kept logits against their lse, summed over heads and a tile's rows."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def pool_tiles(
    x_of, top_of, lse_of, seq_of, pos_of, filled_of, order_of, end_of, out_of, slots, blocks,
    G: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    EVICTED: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tile and KV head, chunk): BN slots, the rows order[end[tile - 1]:end[tile]] of the tile, BR at a time.

    x, top, lse and the constants as `pool` has them. out [tiles, G, slots], 0 where none of the rows reaches.
    """
    stream = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    tile, g = stream // G, stream % G
    begin = tl.load(end_of + tile - 1, mask=tile > 0, other=0).to(tl.int32)
    end = tl.load(end_of + tile).to(tl.int32)
    start = tl.program_id(1) * BN
    n, h, some = start + tl.arange(0, BN), tl.arange(0, WIDE), tl.arange(0, BR)
    flat = tl.arange(0, BN * WIDE)
    total = tl.zeros((BN,), tl.float32)
    for at in range(begin, end, BR):
        there = at + some < end
        row = tl.load(order_of + at + some, mask=there, other=0).to(tl.int64)
        reach = tl.load(filled_of + tl.load(seq_of + row, mask=there, other=0), mask=there, other=0).to(tl.int32)
        if not EVICTED:
            reach = tl.minimum(reach, tl.load(pos_of + row, mask=there, other=-1).to(tl.int32) + 1)
        own = row * G + g
        lse = tl.load(lse_of + own[:, None] * GROUP + h[None, :], mask=there[:, None] & (h < GROUP)[None, :], other=0.0)
        base = tl.where(lse == float("-inf"), 0.0, lse).to(tl.float32) * LOG2E
        seen = (n[None, :] < reach[:, None])[:, :, None] & (h < GROUP)[None, None, :]
        if WIDE == GROUP:  # the logits of a row's chunk lie side by side: a thread loads as many bytes as it can
            left = tl.minimum(reach - start, BN) * GROUP
            place = (own * slots + start)[:, None] * GROUP + flat[None, :]
            x = tl.load(x_of + place, mask=flat[None, :] < left[:, None], other=float("-inf"))
            x = tl.reshape(x, (BR, BN, WIDE)).to(tl.float32)
        else:
            place = (own[:, None] * slots + n[None, :])[:, :, None] * GROUP + h[None, None, :]
            x = tl.load(x_of + place, mask=seen, other=float("-inf")).to(tl.float32)
        if HALVES:
            place = (own[:, None] * blocks + (n // BLOCK)[None, :])[:, :, None] * GROUP + h[None, None, :]
            x += tl.load(top_of + place, mask=seen, other=0.0)
        else:
            x = x * LOG2E
        total += tl.sum(tl.sum(tl.exp2(x - base[:, None, :]), 2), 0)
    tl.store(out_of + stream * slots + n, total, mask=n < slots)
