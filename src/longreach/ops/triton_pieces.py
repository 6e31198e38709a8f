# mypy: ignore-errors
"""Attention of a few rows over a part of their keys, chunk by chunk, for Triton kernels of several ops. Logits are in
base 2."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_keys(peak, total, acc, y, v):
    """Maxima [M], sums [M] and weighted values [M, D] with the keys of logits y [M, N] and values v [N, D] added."""
    higher = tl.maximum(peak, tl.max(y, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(y - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(p, 1)
    return higher, total, tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")


@triton.jit
def write_piece(out, lse, place, peak, total, acc, d, there, inside, D: tl.constexpr):
    """Write out [M, D] and lse [M] of rows x heads at `place` [M]. NaN is something: only a sum of 0 is no key."""
    none = total == 0
    whole = tl.where(none, 1.0, total)
    tl.store(lse + place, tl.where(none, float("-inf"), (peak + tl.log2(whole)) * LN2), mask=there)
    tl.store(out + place[:, None] * D + d[None, :], acc / whole[:, None], mask=there[:, None] & inside[None, :])
