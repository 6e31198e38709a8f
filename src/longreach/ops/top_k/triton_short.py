# mypy: ignore-errors
"""The Triton kernel of top_k for rows that one program holds."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.top_k import triton_keys as keys
from longreach.ops.top_k.triton_keys import CAPACITY, COLUMNS, LEAST, OVER


@triton.jit
def short(given, used, index, NB: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr):
    """A whole row of up to NB columns at once: its k-th key, then the columns chosen. EARLY: see `write`."""
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    x, length, k, first, stop, busy = keys.row_of(row, given)
    tl.store(used + row, k)
    if busy:
        column = tl.arange(0, NB)
        rank = k - first - (length - stop)
        v = tl.load(x + column, mask=column < given[COLUMNS], other=float("nan")).to(tl.float32)
        middle = (column >= first) & (column < stop)
        key = tl.where(middle, keys.key_of(v), LEAST)
        b = tl.max(key, 0) + 1
        a = tl.where(rank > 0, tl.min(tl.where(middle, key, OVER), 0), b - 1)
        from_a, from_b = stop - first, tl.full((), 0, tl.int32)
        even = from_a > 0
        while (b - a != 1) & (from_a != rank):
            one, two = keys.around(rank, a, b, from_a, from_b, even)
            from_one, from_two = keys.reaching(key, one, two)
            a, b, from_a, from_b, even = keys.narrow(rank, a, b, from_a, from_b, one, two, from_one, from_two)
        chosen = (column < length) & ((key > a) | ~middle)
        tie = middle & (key == a)
        if from_a != rank:
            each = tie.to(tl.int32)
            tie = tie & (tl.cumsum(each, 0) - each < rank - from_b)
        mine = (chosen | tie).to(tl.int32)
        place = tl.cumsum(mine, 0) - mine
        tl.store(index + row.to(tl.int64) * given[CAPACITY] + place, column, mask=(mine != 0) & (place < k))
    if CHAINED and not EARLY:
        gdc_launch_dependents()
