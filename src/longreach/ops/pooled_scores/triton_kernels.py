# mypy: ignore-errors
"""The Triton kernel of pooled_scores: kept logits against their lse, summed over the query heads of a KV head."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def pool(
    x_of, top_of, lse_of, seq_of, pos_of, filled_of, out_of, slots, blocks,
    G: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    EVICTED: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, share): every share-th chunk of BN slots of those the row reaches.

    x [R, G, slots, GROUP], top [R, G, blocks, GROUP] (BLOCK slots each; HALVES, else x are logits and there is none),
    lse [R, G * GROUP], out [R, G, slots]. WIDE: the power of two from GROUP on.
    """
    stream = tl.program_id(0).to(tl.int64)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = stream // G
    reach = tl.load(filled_of + tl.load(seq_of + row)).to(tl.int32)
    if not EVICTED:
        reach = tl.minimum(reach, tl.load(pos_of + row) + 1).to(tl.int32)
    # a chunk's logits lie side by side: flat, so that a thread loads as many bytes as it can
    flat = tl.arange(0, BN * WIDE)
    h = tl.arange(0, WIDE)
    n = tl.arange(0, BN)
    lse = tl.load(lse_of + stream * GROUP + h, mask=h < GROUP, other=0.0).to(tl.float32)
    base = tl.where(lse == float("-inf"), 0.0, lse) * LOG2E
    x_of += stream * slots * GROUP
    top_of += stream * blocks * GROUP
    for start in range(tl.program_id(1) * BN, reach, tl.num_programs(1) * BN):
        if WIDE == GROUP:
            at = (tl.zeros((1,), tl.int64) + start) * GROUP + flat
            x = tl.load(x_of + at, mask=flat < tl.minimum(reach - start, BN) * GROUP, other=float("-inf"))
            x = tl.reshape(x, (BN, WIDE)).to(tl.float32)
        else:
            there = (start + n < reach)[:, None] & (h < GROUP)[None, :]
            at = (start + n).to(tl.int64)[:, None] * GROUP + h[None, :]
            x = tl.load(x_of + at, mask=there, other=float("-inf")).to(tl.float32)
        if HALVES:
            there = (start + n < reach)[:, None] & (h < GROUP)[None, :]
            at = ((start + n) // BLOCK)[:, None] * GROUP + h[None, :]
            x += tl.load(top_of + at, mask=there, other=0.0)
        else:
            x = x * LOG2E
        s = tl.sum(tl.exp2(x - base[None, :]), 1)
        tl.store(out_of + stream * slots + start + n, s, mask=start + n < reach)
