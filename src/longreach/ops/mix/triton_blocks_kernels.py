# mypy: ignore-errors
"""The Triton kernels of attend_blocks: attention to windows and recalled blocks in pieces, and the mixture of these."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.triton_pieces import add_keys, write_piece
from longreach.ops.triton_reads import peek

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _slots(j, end, far, first, entries, BLOCK: tl.constexpr):
    """Slots of keys j of a window, or (far) of the recalled blocks."""
    entry = peek(entries + j // BLOCK, (j < end) & far)
    return tl.where(far, entry * BLOCK + j % BLOCK, first + j)


@triton.jit(do_not_specialize=["rows", "near", "capacity"])
def attend(
    q, seq_of, pos_of, first_of, index, used, memory, out, lse, rows, scale, near, capacity, G: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, BN: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr,
    EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, share): consecutive keys of the window for the first `near` shares, of the recalled
    blocks (LISTED: there are any) for the others.

    q: (q, row and head stride). memory: (k, page, head and slot stride; v and the same; filled, block table, its row
    stride). index: [rows, G, capacity]. out, lse: a piece for each share; out is left as it is where a share has no
    keys. EARLY: the next kernel may start at once.
    """
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    k_of, k_page, k_head, k_slot, v_of, v_page, v_head, v_slot, filled, table, table_row = memory
    stream, share = tl.program_id(0), tl.program_id(1)
    row, g = (stream // G).to(tl.int64), (stream % G).to(tl.int64)
    seq = tl.load(seq_of + row).to(tl.int64)
    seen = tl.minimum(tl.load(filled + seq).to(tl.int32), tl.load(pos_of + row).to(tl.int32) + 1)
    first = tl.load(first_of + row).to(tl.int32)
    far = share >= near
    length = tl.maximum(seen - first, 0)
    shares, number = near, share
    entries = index + stream.to(tl.int64) * capacity
    if LISTED:
        length = tl.where(far, tl.load(used + stream).to(tl.int32) * BLOCK, length)
        shares = tl.where(far, tl.num_programs(1) - near, near)
        number = tl.where(far, share - near, share)
    per = ((length + BN - 1) // BN + shares - 1) // shares * BN
    begin = number * per
    end = tl.minimum(begin + per, length)
    m = tl.arange(0, M)
    d = tl.arange(0, D2)
    n = tl.arange(0, BN)
    there, inside = m < GROUP, d < D
    head = g * GROUP + m
    place = (share.to(tl.int64) * rows + row) * G * GROUP + head
    if begin < end:
        x = tl.load(
            q[0] + row * q[1] + head[:, None] * q[2] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        k_of += g * k_head
        v_of += g * v_head
        pages = table + seq * table_row
        if not PAGED:
            page = seq
            if TABLED:
                page = tl.load(pages).to(tl.int64)
            k_of += page * k_page
            v_of += page * v_page
        if LISTED:
            slot = _slots(begin + n, end, far, first, entries, BLOCK)
        else:
            slot = first + begin + n
        if PAGED:
            page = peek(pages + slot // PAGE, (begin + n < end) & (slot < seen))
        peak = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D2), tl.float32)
        for at in tl.range(begin, end, BN, num_stages=STAGES):
            if LISTED:  # asked for now, needed in the next round
                next_slot = _slots(at + BN + n, end, far, first, entries, BLOCK)
            else:
                next_slot = slot + BN
            if PAGED:
                next_page = peek(pages + next_slot // PAGE, (at + BN + n < end) & (next_slot < seen))
                at_k = page.to(tl.int64) * k_page + (slot % PAGE).to(tl.int64) * k_slot
                at_v = page.to(tl.int64) * v_page + (slot % PAGE).to(tl.int64) * v_slot
            else:
                at_k, at_v = slot.to(tl.int64) * k_slot, slot.to(tl.int64) * v_slot
            some = (at + n < end) & (slot < seen)
            k = tl.load(k_of + at_k[None, :] + d[:, None], mask=some[None, :] & inside[:, None], other=0.0)
            v = tl.load(v_of + at_v[:, None] + d[None, :], mask=some[:, None] & inside[None, :], other=0.0)
            y = tl.dot(x, k, input_precision="ieee") * (scale * LOG2E)
            y = tl.where(some[None, :], y, float("-inf"))
            peak, total, acc = add_keys(peak, total, acc, y, v)
            slot = next_slot
            if PAGED:
                page = next_page
        write_piece(out, lse, place, peak, total, acc, d, there, inside, D)
    else:
        tl.store(lse + place, tl.full((M,), float("-inf"), tl.float32), mask=there)


@triton.jit
def _pieces(out, lse, w, at, count, s, number, d, D: tl.constexpr):
    """Pieces [S] of one row and head: lse, -inf for those without keys or weight, and values [S, BD]."""
    place = s.to(tl.int64) * count + at
    x = tl.load(lse + place, mask=s < number, other=float("-inf"))
    part = tl.load(out + place[:, None] * D + d[None, :], mask=(s < number)[:, None] & (d < D)[None, :], other=0.0)
    x = tl.where(w == 0.0, float("-inf"), x)
    return x, tl.where((x != float("-inf"))[:, None], part, 0.0)  # pieces without keys hold anything


@triton.jit(do_not_specialize=["heads", "count", "near", "pieces", "summaries"])
def mix(
    keys, keys_lse, means, means_lse, weights, strides, out, lse, heads, count, near, pieces, summaries,
    LEVELS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, S: tl.constexpr, S2: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and head, BD channels): `pieces` of keys, up to S, of which `near` are of windows and the others of
    recalled blocks; `summaries` pieces of these, up to S2.

    weights: [rows, LEVELS], of levels 1, 2 and 3 in columns 0, SECOND and THIRD. EARLY: the next kernel may start at
    once.
    """
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    from_weights = weights + at // heads * strides[0]
    first, second, third, some = 0.0, 0.0, 0.0, 0
    for level in tl.static_range(LEVELS):
        w = tl.load(from_weights + level * strides[1]).to(tl.float32)
        w = tl.where(w < 0.0, 0.0, w)
        some += (w != 0.0).to(tl.int32)
        if level == 0:
            first = w
        elif level == SECOND:
            second = w
        elif level == THIRD:
            third = w
    first = tl.where(some == 0, 1.0, first)
    s = tl.arange(0, S)
    w = tl.where(s < near, first, third)
    x, part = _pieces(keys, keys_lse, w, at, count, s, pieces, d, D)
    top = tl.max(x, 0)
    if S2:
        s2 = tl.arange(0, S2)
        w2 = tl.where(s2 < summaries, second, 0.0)
        x2, part2 = _pieces(means, means_lse, w2, at, count, s2, summaries, d, D)
        top = tl.maximum(top, tl.max(x2, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    size = w * tl.exp2((x - top) * LOG2E)
    total = tl.sum(size, 0)
    acc = tl.sum(size[:, None] * part, 0)
    if S2:
        size2 = w2 * tl.exp2((x2 - top) * LOG2E)
        total += tl.sum(size2, 0)
        acc += tl.sum(size2[:, None] * part2, 0)
    none = total == 0  # NaN is something
    whole = tl.where(none, 1.0, total)
    tl.store(out + at * D + d, acc / whole, mask=d < D)
    tl.store(lse + at, tl.where(none, float("-inf"), top + tl.log(whole)))
    if CHAINED and not EARLY:
        gdc_launch_dependents()
