# mypy: ignore-errors
"""The Triton kernels of mix: M rows x heads a program, S sets, all tensors fp32 and contiguous but the weights."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def _own(count, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """This program's rows x heads [M] and whether they are there; places of their channels [M, BD], and whether."""
    m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    d = tl.arange(0, BD)
    there = m < count
    return m, there, m[:, None] * D + d[None, :], there[:, None] & (d < D)[None, :]


@triton.jit
def _sizes(lses, weights, strides, m, heads, there, gap, S: tl.constexpr):
    """For each set its weight and exp(lse_s - top), [M] each; the sum of their products; top."""
    ws, xs = (), ()
    top = tl.full(m.shape, float("-inf"), tl.float32)
    for s in tl.static_range(S):
        at = m // heads * strides[0] + m % heads * strides[1] + s * strides[2]
        w = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(lses[s] + m, mask=there, other=float("-inf"))
        top = tl.where(w > 0, tl.maximum(top, x), top)
        ws, xs = ws + (w,), xs + (x,)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros_like(top)
    sizes = ()
    for s in tl.static_range(S):
        size = tl.exp(tl.minimum(xs[s] - top, gap))
        sizes = sizes + (size,)
        total += ws[s] * size
    return ws, sizes, total, top


@triton.jit
def mixed(
    outs, lses, weights, strides, out, lse, kept, heads, count, gap,
    S: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """KEEP: kept gets a copy of outs, in a dtype of its own."""
    m, there, at, both = _own(count, M, D, BD)
    ws, sizes, total, top = _sizes(lses, weights, strides, m, heads, there, gap, S)
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    acc = tl.zeros((M, BD), tl.float32)
    for s in tl.static_range(S):
        part = tl.load(outs[s] + at, mask=both, other=0.0)
        acc += (ws[s] * sizes[s] / whole)[:, None] * part
        if KEEP:
            tl.store(kept[s] + at, part.to(kept[s].dtype.element_ty), mask=both)
    tl.store(out + at, tl.where(none[:, None], 0.0, acc), mask=both)
    tl.store(lse + m, tl.where(none, float("-inf"), top + tl.log(whole)), mask=there)


@triton.jit
def gradients(
    outs, lses, weights, strides, out, dout, dlse, d_outs, d_lses, d_weights, heads, count, gap,
    S: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_outs, d_lses: those of each set; d_weights [R H, S]."""
    m, there, at, both = _own(count, M, D, BD)
    ws, sizes, total, _ = _sizes(lses, weights, strides, m, heads, there, gap, S)
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    y = tl.load(out + at, mask=both, other=0.0)
    dy = tl.load(dout + at, mask=both, other=0.0)
    dx = tl.load(dlse + m, mask=there, other=0.0)
    for s in tl.static_range(S):
        size = tl.where(none, 0.0, sizes[s] / whole)
        share = ws[s] * size
        moved = tl.sum(dy * (tl.load(outs[s] + at, mask=both, other=0.0) - y), 1) + dx
        tl.store(d_outs[s] + at, share[:, None] * dy, mask=both)
        tl.store(d_lses[s] + m, tl.where(share == 0.0, 0.0, share * moved), mask=there)
        tl.store(d_weights + m * S + s, tl.where(size == 0.0, 0.0, size * moved), mask=there)


@triton.jit
def given_to_sets(
    kept, lses, weights, strides, out, dout, dlse, delta, rounded, their_lses, d_weights, heads, count, gap,
    S: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What the backward of each set's attention takes, so that its gradients are those through the mixture.

    delta [R H] = sum_d dout out - dlse, and rounded, dout with the dtype of the queries, are the same for all sets.
    their_lses: for each set log sum exp of the whole less its log-weight, inf where it weighs 0: exp(logit - this) is
    then a key's share of the mixture. d_weights [R H, S].
    """
    m, there, at, both = _own(count, M, D, BD)
    ws, sizes, total, top = _sizes(lses, weights, strides, m, heads, there, gap, S)
    none = total == 0.0
    whole = tl.where(none, 1.0, total)
    dy = tl.load(dout + at, mask=both, other=0.0)
    less = tl.sum(dy * tl.load(out + at, mask=both, other=0.0), 1) - tl.load(dlse + m, mask=there, other=0.0)
    tl.store(delta + m, less, mask=there)
    tl.store(rounded + at, dy.to(rounded.dtype.element_ty), mask=both)
    for s in tl.static_range(S):
        size = tl.where(none, 0.0, sizes[s] / whole)
        moved = tl.sum(dy * tl.load(kept[s] + at, mask=both, other=0.0).to(tl.float32), 1) - less
        tl.store(d_weights + m * S + s, tl.where(size == 0.0, 0.0, size * moved), mask=there)
        some = (ws[s] * size) > 0.0
        lse = top + tl.log(whole) - tl.log(tl.where(some, ws[s], 1.0))
        tl.store(their_lses[s] + m, tl.where(some, lse, float("inf")), mask=there)
