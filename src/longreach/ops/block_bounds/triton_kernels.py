# mypy: ignore-errors
"""The Triton kernels of block_bounds. Where a block's bounds lie: see api.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def _last_slot(slot, seq, filled):
    """The last slot up to `slot` that is filled; negative for none."""
    return tl.minimum(slot.to(tl.int32), tl.load(filled + seq).to(tl.int32) - 1)


@triton.jit
def _unit_of(block, seq, table, table_row, there, PER: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
             TABLED: tl.constexpr):  # fmt: skip
    """(page of memory, unit in it) of blocks, int64. A block that is not `there` is never looked up."""
    if PAGED:
        number = block * PER // PAGE
        page = tl.load(table + seq.to(tl.int64) * table_row + number, mask=there, other=0).to(tl.int64)
        unit = block - (number * PAGE + PER - 1) // PER
    else:
        page = seq.to(tl.int64)
        if TABLED:
            page = tl.load(table + page * table_row).to(tl.int64)
        unit = block
    return page, unit.to(tl.int64)


@triton.jit
def _bound_block(
    block, seq, g, memory, D: tl.constexpr, D2: tl.constexpr, PER: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, TABLED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Bounds of one block and KV head, written where they belong, if the block has any filled slot."""
    k, k_page, k_head, k_slot, low, low_page, low_head, low_unit, high, high_page, high_head, high_unit = memory[:12]
    filled, table, table_row = memory[12:]
    first = block * PER
    stop = tl.minimum(tl.load(filled + seq).to(tl.int32), first + PER)
    if (block >= 0) & (first < stop):
        d = tl.arange(0, D2)
        n = tl.arange(0, BN)
        head = g.to(tl.int64)
        least = tl.full((D2,), float("inf"), tl.float32)
        largest = tl.full((D2,), float("-inf"), tl.float32)
        page, unit = _unit_of(block, seq, table, table_row, block >= 0, PER, PAGED, PAGE, TABLED)
        to_low = low + page * low_page + head * low_head + unit * low_unit
        to_high = high + page * high_page + head * high_head + unit * high_unit
        for at in range(first, stop, BN):
            slot = at + n
            there = slot < stop
            if PAGED:
                pages = tl.load(table + seq.to(tl.int64) * table_row + slot // PAGE, mask=there, other=0).to(tl.int64)
                place = pages * k_page + (slot % PAGE).to(tl.int64) * k_slot
            else:
                place = page * k_page + slot.to(tl.int64) * k_slot
            inside = there[:, None] & (d < D)[None, :]
            x = tl.load(k + head * k_head + place[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
            least = tl.minimum(least, tl.min(tl.where(there[:, None], x, float("inf")), 0))
            largest = tl.maximum(largest, tl.max(tl.where(there[:, None], x, float("-inf")), 0))
        tl.store(to_low + d, least.to(low.dtype.element_ty), mask=d < D)
        tl.store(to_high + d, largest.to(high.dtype.element_ty), mask=d < D)


@triton.jit
def bound(
    seq_of, block_of, memory, IN_SLOTS: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PER: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One block and KV head a program. memory: (k, low and high, each with page, head and slot or unit stride; filled,
    block table, its row stride). IN_SLOTS: block_of holds slots, which stand for the blocks they lie in.
    """
    if CHAINED:  # few programs in a decode step: the next kernel may start beside them
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    seq = tl.load(seq_of + n).to(tl.int32)
    block = tl.load(block_of + n).to(tl.int32)
    if IN_SLOTS:
        slot = _last_slot(block, seq, memory[12])
        block = tl.where(slot >= 0, slot // PER, -1)
    _bound_block(block, seq, tl.program_id(1), memory, D, D2, PER, PAGED, PAGE, TABLED, BN)


@triton.jit
def score(
    q, seq_of, slot_of, memory, out, blocks, G: tl.constexpr, GROUP: tl.constexpr, GROUP2: tl.constexpr,
    BB: tl.constexpr, NEWEST: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PER: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, share): every share-th chunk of BB blocks before the row's newest one.

    NEWEST: the programs of one more share bound the newest block, which no program scores. q: (q, row and head stride);
    memory: see `bound`; out [R, G, blocks].
    """
    low, low_page, low_head, low_unit, high, high_page, high_head, high_unit = memory[4:12]
    filled, table, table_row = memory[12:]
    stream = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    row, g = stream // G, stream % G
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    seq = tl.load(seq_of + row).to(tl.int32)
    slot = _last_slot(tl.load(slot_of + row), seq, filled)
    newest = tl.where(slot >= 0, slot // PER, -1)
    shares = tl.num_programs(1)
    begin = share * BB
    if NEWEST:
        shares -= 1
        if share == shares:
            _bound_block(newest, seq, g, memory, D, D2, PER, PAGED, PAGE, TABLED, BN)
            begin = newest
    d = tl.arange(0, D2)
    h = tl.arange(0, GROUP2)
    from_q = q[0] + row * q[1] + (g * GROUP + h)[:, None] * q[2] + d[None, :]
    x = tl.load(from_q, mask=(h < GROUP)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    up = tl.sum(tl.maximum(x, 0.0), 0)[None, :]
    down = tl.sum(tl.minimum(x, 0.0), 0)[None, :]
    n = tl.arange(0, BB)
    for start in range(begin, newest, shares * BB):
        block = start + n
        there = block < newest
        page, unit = _unit_of(block, seq, table, table_row, there, PER, PAGED, PAGE, TABLED)
        inside = there[:, None] & (d < D)[None, :]
        from_low = low + page * low_page + g * low_head + unit * low_unit
        from_high = high + page * high_page + g * high_head + unit * high_unit
        least = tl.load(from_low[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.load(from_high[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        s = tl.sum(largest * up + least * down, 1)
        tl.store(out + stream * blocks + block, s, mask=there)
