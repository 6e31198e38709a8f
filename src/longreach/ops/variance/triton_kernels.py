# mypy: ignore-errors
"""The Triton kernel of sampling_variance."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def _places(strides, table, table_row, b, g, slot, there, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys or values of a sequence's slots lie, for KV head g."""
    if PAGED:
        page = tl.load(table + b * table_row + slot // PAGE, mask=there, other=0).to(tl.int64)
        return page * strides[0] + g * strides[1] + (slot % PAGE).to(tl.int64) * strides[2]
    return b * strides[0] + g * strides[1] + slot.to(tl.int64) * strides[2]


@triton.jit
def deviations(
    rows, memory, table, table_row, lists, log_weight, out, lse, found, room, units, pieces, scale, cap,
    WIDTH: tl.constexpr, W2: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, WEIGHTED: tl.constexpr, CAPPED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sum of factor W^2 |v - out|^2 over one of `pieces` parts of a list, for the WIDTH query heads that share it.

    rows: (q, row and head stride, seq, pos); memory: (k and its strides, v and its strides, seq_lens); lists: (number,
    index, count, factor), number [R * units] of the list that each row and unit of heads uses. PER_KV: units of a KV
    head. found: fp32 [R * units, pieces, WIDTH].
    """
    q, q_row, q_head, seq, pos = rows
    k, k_strides, v, v_strides, lens = memory
    number, index, count, factor = lists
    item, piece = tl.program_id(0), tl.program_id(1)
    r, unit = (item // units).to(tl.int64), item % units
    g = (unit // PER_KV).to(tl.int64)
    at = tl.load(number + item).to(tl.int64)
    n = tl.load(count + at)
    n = tl.where(n > room, 0, n).to(tl.int32)  # a list that overflowed was not sampled from
    b = tl.load(seq + r).to(tl.int64)
    reach = tl.minimum(tl.load(lens + b).to(tl.int32), tl.load(pos + r).to(tl.int32) + 1)
    d, head = tl.arange(0, D2), tl.arange(0, W2)
    some = d < D
    total = tl.zeros([W2], tl.float32)
    for first in range(piece * BC, n, pieces * BC):
        c = first + tl.arange(0, BC)
        entry = at * room + c
        slot = tl.load(index + entry, mask=c < n, other=-1).to(tl.int32)
        there = (slot >= 0) & (slot < reach)
        slot = tl.where(there, slot, 0)
        both = there[:, None] & some[None, :]
        k_at = _places(k_strides, table, table_row, b, g, slot, there, PAGED, PAGE)
        v_at = _places(v_strides, table, table_row, b, g, slot, there, PAGED, PAGE)
        key = tl.load(k + k_at[:, None] + d[None, :], mask=both, other=0.0).to(tl.float32)
        value = tl.load(v + v_at[:, None] + d[None, :], mask=both, other=0.0).to(tl.float32)
        share = tl.load(factor + entry, mask=there, other=0.0)
        for h in range(WIDTH):
            mine = r * (units * WIDTH) + unit * WIDTH + h
            query = tl.load(q + r * q_row + (unit * WIDTH + h) * q_head + d, mask=some, other=0.0).to(tl.float32)
            mean = tl.load(out + mine * D + d, mask=some, other=0.0)
            whole = tl.load(lse + mine)
            x = tl.sum(key * query[None, :], 1) * scale
            if CAPPED:
                x = cap * (2.0 / (1.0 + tl.exp(-2.0 * (x / cap))) - 1.0)
            if WEIGHTED:
                x += tl.load(log_weight + entry, mask=there, other=0.0).to(tl.float32)
            w = tl.where(whole == float("-inf"), 0.0, tl.exp(x - whole))
            off = tl.where(both, value - mean[None, :], 0.0)
            one = tl.sum(tl.where(there, share * w * w * tl.sum(off * off, 1), 0.0), 0)
            total += tl.where(head == h, one, 0.0)
    tl.store(found + (item.to(tl.int64) * pieces + piece) * WIDTH + head, total, mask=head < WIDTH)
