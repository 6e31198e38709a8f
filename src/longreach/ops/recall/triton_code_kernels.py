# mypy: ignore-errors
"""The Triton kernels that code blocks of keys, and the queries of few rows."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SUMMARY, BOUNDS, HASH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _pair(i, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of pairs i."""
    if INTERLEAVED:
        return 2 * i, 2 * i + 1
    return i, i + PAIRS


@triton.jit
def _signs(
    a, b, rest, position, inv_freq, planes, to, PAIRS: tl.constexpr, P2: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, REST2: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Write the signs of planes^T x, x with the rotation of a position (fp64) taken off. a, b [P2], rest [REST2]: x in
    fp64, channels of pairs and those after them. planes: [D, BITS]."""
    i = tl.arange(0, P2)
    angle = position * tl.load(inv_freq + i, mask=i < PAIRS, other=0.0).to(tl.float64)
    c, s = tl.cos(angle), tl.sin(angle)
    first, second = _pair(i, PAIRS, INTERLEAVED)
    x, y = a * c + b * s, b * c - a * s
    r = tl.arange(0, REST2)
    for at in range(0, BITS, BB):
        bit = at + tl.arange(0, BB)
        inside = (i < PAIRS)[:, None] & (bit < BITS)[None, :]
        p = tl.load(planes + first[:, None] * BITS + bit[None, :], mask=inside, other=0.0).to(tl.float64)
        z = tl.sum(x[:, None] * p, 0)
        p = tl.load(planes + second[:, None] * BITS + bit[None, :], mask=inside, other=0.0).to(tl.float64)
        z += tl.sum(y[:, None] * p, 0)
        if 2 * PAIRS < D:
            inside = (2 * PAIRS + r < D)[:, None] & (bit < BITS)[None, :]
            p = tl.load(planes + (2 * PAIRS + r)[:, None] * BITS + bit[None, :], mask=inside, other=0.0).to(tl.float64)
            z += tl.sum(rest[:, None] * p, 0)
        tl.store(to + bit, tl.where(z >= 0, 1.0, -1.0).to(to.dtype.element_ty), mask=bit < BITS)


@triton.jit
def _code(
    seq, head, block, memory, table, table_row, turns, inv_freq, planes, STILL: tl.constexpr, KIND: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, PAIRS: tl.constexpr, P2: tl.constexpr, REST2: tl.constexpr,
    INTERLEAVED: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr, PER: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr,
):  # fmt: skip
    """Write the code of a complete block. memory: (k, its page, head and slot stride; codes and theirs). STILL: the
    mean is taken without rotation. Other letters as `code` has them."""
    k, k_page, k_head, k_slot, codes, c_page, c_head, c_unit = memory
    n = tl.arange(0, BN)
    number = block * PER // PAGE if PAGED else 0
    page = seq
    if TABLED:
        page = tl.load(table + seq * table_row + number).to(tl.int64)
    unit = (block - (number * PAGE + PER - 1) // PER if PAGED else block).to(tl.int64)
    to = codes + page * c_page + head * c_head + unit * c_unit
    i = tl.arange(0, P2)
    d = tl.arange(0, D2)
    r = tl.arange(0, REST2)
    first, second = _pair(i, PAIRS, INTERLEAVED)
    a, b = tl.zeros((P2,), tl.float32), tl.zeros((P2,), tl.float32)
    rest = tl.zeros((REST2,), tl.float32)
    high = tl.full((D2,), float("-inf"), tl.float32)
    low = tl.full((D2,), float("inf"), tl.float32)
    for start in range(0, PER, BN):
        j = start + n
        there = j < PER
        slot = block * PER + j
        if PAGED:
            pages = tl.load(table + seq * table_row + slot // PAGE, mask=there, other=0).to(tl.int64)
            keys = k + head * k_head + pages * k_page + (slot % PAGE).to(tl.int64) * k_slot
        else:
            keys = k + head * k_head + page * k_page + slot.to(tl.int64) * k_slot
        if KIND == BOUNDS:
            inside = there[:, None] & (d < D)[None, :]
            x = tl.load(keys[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
            high = tl.maximum(high, tl.max(tl.where(there[:, None], x, float("-inf")), 0))
            low = tl.minimum(low, tl.min(tl.where(there[:, None], x, float("inf")), 0))
        else:
            inside = there[:, None] & (i < PAIRS)[None, :]
            x = tl.load(keys[:, None] + first[None, :], mask=inside, other=0.0).to(tl.float32)
            y = tl.load(keys[:, None] + second[None, :], mask=inside, other=0.0).to(tl.float32)
            if STILL:
                a += tl.sum(x, 0)
                b += tl.sum(y, 0)
            else:
                from_turns = j[:, None] * PAIRS + i[None, :]
                c = tl.load(turns[0] + from_turns, mask=inside, other=0.0)
                s = tl.load(turns[1] + from_turns, mask=inside, other=0.0)
                a += tl.sum(x * c - y * s, 0)
                b += tl.sum(y * c + x * s, 0)
            if 2 * PAIRS < D:
                inside = there[:, None] & (2 * PAIRS + r < D)[None, :]
                z = tl.load(keys[:, None] + (2 * PAIRS + r)[None, :], mask=inside, other=0.0).to(tl.float32)
                rest += tl.sum(z, 0)
    if KIND == BOUNDS:
        tl.store(to + d, high.to(codes.dtype.element_ty), mask=d < D)
        tl.store(to + D + d, low.to(codes.dtype.element_ty), mask=d < D)
    else:
        a, b, rest = a / PER, b / PER, rest / PER
        if KIND == SUMMARY:
            tl.store(to + first, a.to(codes.dtype.element_ty), mask=i < PAIRS)
            tl.store(to + second, b.to(codes.dtype.element_ty), mask=i < PAIRS)
            if 2 * PAIRS < D:
                tl.store(to + 2 * PAIRS + r, rest.to(codes.dtype.element_ty), mask=2 * PAIRS + r < D)
        else:
            middle = (block.to(tl.int64) * PER).to(tl.float64) + (PER - 1) * 0.5
            _signs(a.to(tl.float64), b.to(tl.float64), rest.to(tl.float64), middle, inv_freq, planes, to, PAIRS, P2,
                   INTERLEAVED, D, REST2, BITS, BB)  # fmt: skip


@triton.jit
def code(
    seq_of, block_of, memory, values, held, turns, inv_freq, planes, IN_SLOTS: tl.constexpr, MEANS: tl.constexpr,
    KIND: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PAIRS: tl.constexpr, P2: tl.constexpr, REST2: tl.constexpr,
    INTERLEAVED: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr, PER: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (block, KV head, 0 or 1): its code, written where it belongs, if the block is complete; 1: with MEANS
    the mean of its values.

    IN_SLOTS: block_of holds slots, which stand for the blocks that they are the last slots of. memory: (k, its page,
    head and slot stride; codes, their page, head and unit stride); values: the same of values and their means. held:
    (filled, block table, its row stride). turns: (cos, sin) fp32 [PER, PAIRS], by which keys are rotated to the middle
    of their block. PAIRS: of rotated channels; REST2: the power of two from the number of other channels on. planes:
    [D, BITS]. EARLY: the next kernel may start at once.
    """
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    filled, table, table_row = held
    at = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    seq = tl.load(seq_of + at).to(tl.int64)
    block = tl.load(block_of + at).to(tl.int32)
    if IN_SLOTS:
        block = tl.where(block % PER == PER - 1, block // PER, -1)
    length = tl.load(filled + seq).to(tl.int32)
    if (block >= 0) & (block < length // PER):
        if MEANS:
            if tl.program_id(2) == 0:
                _code(seq, head, block, memory, table, table_row, turns, inv_freq, planes, False, KIND, D, D2, PAIRS,
                      P2, REST2, INTERLEAVED, BITS, BB, PER, BN, PAGED, PAGE, TABLED)  # fmt: skip
            else:
                _code(seq, head, block, values, table, table_row, turns, inv_freq, planes, True, KIND, D, D2, PAIRS,
                      P2, REST2, INTERLEAVED, BITS, BB, PER, BN, PAGED, PAGE, TABLED)  # fmt: skip
        else:
            _code(seq, head, block, memory, table, table_row, turns, inv_freq, planes, False, KIND, D, D2, PAIRS, P2,
                  REST2, INTERLEAVED, BITS, BB, PER, BN, PAGED, PAGE, TABLED)  # fmt: skip


@triton.jit
def code_query(
    q, pos_of, inv_freq, planes, out, KIND: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PAIRS: tl.constexpr,
    P2: tl.constexpr, REST2: tl.constexpr, INTERLEAVED: tl.constexpr, BITS: tl.constexpr, BB: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): the code of a query. q: (q, row and head stride); out [R, H, F]."""
    if CHAINED:
        gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x_of = q[0] + row * q[1] + head * q[2]
    stream = row * tl.num_programs(1) + head
    if KIND == BOUNDS:
        d = tl.arange(0, D2)
        x = tl.load(x_of + d, mask=d < D, other=0.0).to(tl.float32)
        to = out + stream * 2 * D
        tl.store(to + d, tl.where(x < 0, 0.0, x).to(out.dtype.element_ty), mask=d < D)
        tl.store(to + D + d, tl.where(x > 0, 0.0, x).to(out.dtype.element_ty), mask=d < D)
    else:
        i = tl.arange(0, P2)
        r = tl.arange(0, REST2)
        first, second = _pair(i, PAIRS, INTERLEAVED)
        a = tl.load(x_of + first, mask=i < PAIRS, other=0.0).to(tl.float64)
        b = tl.load(x_of + second, mask=i < PAIRS, other=0.0).to(tl.float64)
        rest = tl.load(x_of + 2 * PAIRS + r, mask=2 * PAIRS + r < D, other=0.0).to(tl.float64)
        position = tl.load(pos_of + row).to(tl.float64)
        _signs(a, b, rest, position, inv_freq, planes, out + stream * BITS, PAIRS, P2, INTERLEAVED, D, REST2, BITS, BB)
