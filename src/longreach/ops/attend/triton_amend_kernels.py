# mypy: ignore-errors
"""The Triton kernel that ends attend_amend, in the place of attend's merge_pieces."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.attend import triton_streams as streams
from longreach.ops.attend.triton_merging import LN2, LOG2E, finish, gathered, joined


@triton.jit
def _sides(
    program, row, head, m, d, items, programs, result, MR: tl.constexpr, DEALT: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Both sides of the split: maximum [2], sum [2], weighted values [2, BD] of channels d, from the pieces of their
    items, C at a time."""
    out, lse, _, pieces, ends_at, heads, row_count = result
    side = tl.arange(0, 2)
    if DEALT:
        peak, total, acc = gathered(2 * program + side, m, d, items, programs, pieces, ends_at, MR, True, D, BD, 2, C)
    else:
        place = (row + side * row_count).to(tl.int64) * heads + head
        peak = tl.load(lse + place, mask=row + side * 0 >= 0, other=float("-inf")) * LOG2E
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        inside = (row + side * 0 >= 0)[:, None] & (d < D)[None, :]
        acc = tl.load(out + place[:, None] * D + d[None, :], mask=inside, other=0.0)
    return peak, total, acc


@triton.jit
def _one(side: tl.constexpr, peak, total, acc):
    """One of two sides: [1], [1], [1, BD]."""
    mine = tl.arange(0, 2) == side
    one = tl.zeros((1,), tl.float32)
    peak = one + tl.max(tl.where(mine, peak, float("-inf")), 0)
    total = one + tl.sum(tl.where(mine, total, 0.0), 0)
    return peak, total, tl.sum(tl.where(mine[:, None], acc, 0.0), 0)[None, :]


@triton.jit
def amend_pieces(
    rows, result, given, items, programs, layout: tl.constexpr, form: tl.constexpr, SUNK: tl.constexpr,
    DEALT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Entry, result and lse of one row and head, and BD of its channels, from the pieces of its two items.

    Arguments as in merge_pieces, and given: (entries' out and lse, take, put, out, lse, lse of the entry, sink).
    CHAINED: right after attend_pieces, which has waited for all before itself and writes pieces alone. So rows, take,
    put and entries are read before gdc_wait(), past L1.
    """
    entry_out, entry_lse, take, put, out, lse, entry_of, sink = given
    heads = result[5]
    GROUP: tl.constexpr = form[2]
    MR: tl.constexpr = layout[0] * GROUP
    program = tl.program_id(0) // MR  # tile x KV head
    m = tl.program_id(0) % MR
    t = tl.zeros((1,), tl.int32) + m // GROUP
    row = streams.row_of(program // form[1], t, rows, layout)
    head = tl.zeros((1,), tl.int32) + program % form[1] * GROUP + m % GROUP
    there = row >= 0
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = there[:, None] & (d < D)[None, :]
    place = row.to(tl.int64) * heads + head
    source = tl.load(take + place, mask=there, other=-1, cache_modifier=".cg").to(tl.int64)
    target = tl.load(put + place, mask=there, other=-1, cache_modifier=".cg").to(tl.int64)
    some = source >= 0
    peak = tl.load(entry_lse + source, mask=some, other=float("-inf"), cache_modifier=".cg") * LOG2E
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    at = entry_out + source[:, None] * D + d[None, :]
    acc = tl.load(at, mask=some[:, None] & inside, other=0.0, cache_modifier=".cg")
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    peaks, totals, accs = _sides(program, row, head, m, d, items, programs, result, MR, DEALT, D, BD, C)
    peak2, total2, acc2 = _one(0, peaks, totals, accs)
    peak, total, acc = joined(peak, total, acc, peak2, total2, acc2)
    full = total > 0
    whole = tl.where(full, total, 1.0)
    found = tl.where(full, (peak + tl.log2(whole)) * LN2, float("-inf"))
    tl.store(entry_of + place, found, mask=there)
    tl.store(entry_lse + target, found, mask=target >= 0)
    tl.store(entry_out + target[:, None] * D + d[None, :], acc / whole[:, None], mask=(target >= 0)[:, None] & inside)
    peak2, total2, acc2 = _one(1, peaks, totals, accs)
    peak, total, acc = joined(peak, total, acc, peak2, total2, acc2)
    finish(row, head, peak, total, acc, sink, out, lse, heads, D, SUNK, True, d, there)
    if CHAINED and not EARLY:
        gdc_launch_dependents()
