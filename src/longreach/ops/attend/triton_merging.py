# mypy: ignore-errors
"""The Triton kernel that puts the pieces of attend together; how a result is written. Logits are in base 2."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.attend import triton_streams as streams

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finish(
    row, head, peak, total, acc, sink, out, lse, heads, D: tl.constexpr, SUNK: tl.constexpr, VALUES: tl.constexpr,
    d, there,
):  # fmt: skip
    """Write lse and (with VALUES) out [.., d] of (row, head), a sink logit merged in."""
    if SUNK:
        x = tl.load(sink + head, mask=there, other=float("-inf")).to(tl.float32) * LOG2E
        high = tl.maximum(peak, x)
        base = tl.where(high == float("-inf"), 0.0, high)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.exp2(x - base)
        acc = acc * shrink[:, None]
        peak = high
    some = total > 0
    whole = tl.where(some, total, 1.0)
    place = row.to(tl.int64) * heads + head
    tl.store(lse + place, tl.where(some, (peak + tl.log2(whole)) * LN2, float("-inf")), mask=there)
    if VALUES:
        tl.store(
            out + place[:, None] * D + d[None, :],
            acc / whole[:, None],
            mask=there[:, None] & (d < D)[None, :],
        )


@triton.jit
def joined(peak, total, acc, peak2, total2, acc2):
    """Two results over different keys as one: maxima [S], sums [S], weighted values [S, BD]."""
    high = tl.maximum(peak, peak2)
    base = tl.where(high == float("-inf"), 0.0, high)
    one, two = tl.exp2(peak - base), tl.exp2(peak2 - base)
    return high, total * one + total2 * two, acc * one[:, None] + acc2 * two[:, None]


@triton.jit
def _together(peaks, totals, parts):
    """Pieces [S, C], [S, C], [S, C, BD] as one each."""
    high = tl.max(peaks, 1)
    weight = tl.exp2(peaks - tl.where(high == float("-inf"), 0.0, high)[:, None])
    return high, tl.sum(totals * weight, 1), tl.sum(parts * weight[:, :, None], 1)


@triton.jit
def _pieces(
    place, there, pieces, MR: tl.constexpr, m, d, VALUES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Maxima, sums and weighted values [.., d] of pieces at `place` [S, C], for row x head m of their items."""
    place = place * MR + m
    peaks = tl.load(pieces[0] + place, mask=there, other=float("-inf"))
    totals = tl.load(pieces[1] + place, mask=there, other=0.0)
    parts = tl.zeros((1, 1, BD), tl.float32)
    if VALUES:
        at = pieces[2] + place.to(tl.int64)[:, :, None] * D + d[None, None, :]
        parts = tl.load(at, mask=there[:, :, None] & (d < D)[None, None, :], other=0.0)
    return peaks, totals, parts


@triton.jit
def gathered(
    item, m, d, items, programs, pieces, ends_at, MR: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Maximum [S], sum [S] and weighted values [S, BD], channels d, of row x head m of items [S], from their pieces.

    C pieces of each item at once, which is all of them where streams are about as long as one another. What is left of
    a longer one comes in larger chunks, the next on its way while one is added.
    """
    start = tl.load(ends_at + item - 1, mask=item > 0, other=0)
    end = tl.load(ends_at + item)
    whole = tl.maximum(tl.load(ends_at + items - 1), 1)
    share = tl.minimum(whole, programs)
    first = streams.holder(start, whole, share)
    count = tl.where(end > start, streams.holder(end - 1, whole, share) - first + 1, 0)
    first += item
    c = tl.arange(0, C)[None, :]
    peak, total, acc = _together(*_pieces(first[:, None] + c, c < count[:, None], pieces, MR, m, d, VALUES, D, BD))
    if tl.max(count, 0) > C:
        MORE: tl.constexpr = max(8, 4096 // BD)
        more = tl.arange(0, MORE)[None, :]
        for s in tl.static_range(S):
            mine = tl.arange(0, S) == s
            begin, left = tl.sum(tl.where(mine, first, 0), 0), tl.sum(tl.where(mine, count, 0), 0)
            peak2 = tl.full((1,), float("-inf"), tl.float32)
            total2 = tl.zeros((1,), tl.float32)
            acc2 = tl.zeros((1, BD), tl.float32)
            for at in tl.range(C, left, MORE, num_stages=2):
                p, t, a = _together(*_pieces(begin + at + more, at + more < left, pieces, MR, m, d, VALUES, D, BD))
                peak2, total2, acc2 = joined(peak2, total2, acc2, p, t, a)
            peak2, total2 = tl.where(mine, peak2, float("-inf")), tl.where(mine, total2, 0.0)
            peak, total, acc = joined(peak, total, acc, peak2, total2, tl.where(mine[:, None], acc2, 0.0))
    return peak, total, acc


@triton.jit
def merge_pieces(
    rows, result, items, programs, layout: tl.constexpr, form: tl.constexpr, SUNK: tl.constexpr,
    VALUES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The result of one row and head, and BD of its channels, from the pieces of its item, C at a time.

    EARLY: the next kernel, attention perhaps, may start at once, else when this one is done.
    """
    out, lse, sink, pieces, ends_at, heads, row_count = result
    GROUP: tl.constexpr = form[2]
    MR: tl.constexpr = layout[0] * GROUP
    item = tl.program_id(0) // MR
    m = tl.program_id(0) % MR
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    peak, total, acc = gathered(item + tl.arange(0, 1), m, d, items, programs, pieces, ends_at, MR, VALUES, D, BD, 1, C)
    tile = item // (form[0] * form[1])
    t = tl.zeros((1,), tl.int32) + m // GROUP
    row = streams.row_of(tile, t, rows, layout)
    head = tl.zeros((1,), tl.int32) + item // form[0] % form[1] * GROUP + m % GROUP
    shifted = row + item % form[0] * row_count
    finish(shifted, head, peak, total, acc, sink, out, lse, heads, D, SUNK, VALUES, d, row >= 0)
    if CHAINED and not EARLY:
        gdc_launch_dependents()
