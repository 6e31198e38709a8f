# mypy: ignore-errors
"""The Triton kernel that ends attend_amend, in the place of attend's merge_pieces."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.attend.triton_kernels import LN2, LOG2E, _finish, _gathered, _row_of


@triton.jit
def _side(
    part: tl.constexpr, program, row, head, m, items, programs, result, MR: tl.constexpr, DEALT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One side of the split: maximum [1], sum [1], weighted values [1, BD]."""
    out, lse, _, pieces, ends_at, heads, row_count = result
    if DEALT:
        peak, total, acc = _gathered(2 * program + part, m, items, programs, pieces, ends_at, MR, True, D, BD, C)
    else:
        d = tl.arange(0, BD)
        place = (row + part * row_count).to(tl.int64) * heads + head
        peak = tl.load(lse + place, mask=row >= 0, other=float("-inf")) * LOG2E
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        inside = (row >= 0)[:, None] & (d < D)[None, :]
        acc = tl.load(out + place[:, None] * D + d[None, :], mask=inside, other=0.0)
    return peak, total, acc


@triton.jit
def _joined(peak, total, acc, peak2, total2, acc2):
    high = tl.maximum(peak, peak2)
    base = tl.where(high == float("-inf"), 0.0, high)
    one, two = tl.exp2(peak - base), tl.exp2(peak2 - base)
    return high, total * one + total2 * two, acc * one[:, None] + acc2 * two[:, None]


@triton.jit
def amend_pieces(
    rows, result, given, items, programs, layout: tl.constexpr, form: tl.constexpr, SUNK: tl.constexpr,
    DEALT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Entry, result and lse of one row and head, from the pieces of its two items.

    Arguments as in merge_pieces, and given: (entries' out and lse, take, put, out, lse, lse of the entry, sink).
    """
    entry_out, entry_lse, take, put, out, lse, entry_of, sink = given
    heads = result[5]
    GROUP: tl.constexpr = form[2]
    MR: tl.constexpr = layout[0] * GROUP
    program = tl.program_id(0) // MR  # tile x KV head
    m = tl.program_id(0) % MR
    t = tl.zeros((1,), tl.int32) + m // GROUP
    row = _row_of(program // form[1], t, rows, layout)
    head = tl.zeros((1,), tl.int32) + program % form[1] * GROUP + m % GROUP
    there = row >= 0
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    d = tl.arange(0, BD)
    inside = there[:, None] & (d < D)[None, :]
    place = row.to(tl.int64) * heads + head
    source = tl.load(take + place, mask=there, other=-1).to(tl.int64)
    target = tl.load(put + place, mask=there, other=-1).to(tl.int64)
    some = source >= 0
    peak = tl.load(entry_lse + source, mask=some, other=float("-inf")) * LOG2E
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    acc = tl.load(entry_out + source[:, None] * D + d[None, :], mask=some[:, None] & inside, other=0.0)
    peak2, total2, acc2 = _side(0, program, row, head, m, items, programs, result, MR, DEALT, D, BD, C)
    peak, total, acc = _joined(peak, total, acc, peak2, total2, acc2)
    full = total > 0
    whole = tl.where(full, total, 1.0)
    found = tl.where(full, (peak + tl.log2(whole)) * LN2, float("-inf"))
    tl.store(entry_of + place, found, mask=there)
    tl.store(entry_lse + target, found, mask=target >= 0)
    tl.store(entry_out + target[:, None] * D + d[None, :], acc / whole[:, None], mask=(target >= 0)[:, None] & inside)
    peak2, total2, acc2 = _side(1, program, row, head, m, items, programs, result, MR, DEALT, D, BD, C)
    peak, total, acc = _joined(peak, total, acc, peak2, total2, acc2)
    _finish(row, head, peak, total, acc, sink, out, lse, heads, D, SUNK, True, d, there)
