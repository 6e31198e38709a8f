# mypy: ignore-errors
"""The Triton kernel of attend for wide heads and large groups: what attend_pieces does, with other blocks.

It differs from attend_pieces in four ways. The query heads of a KV head may be cut into SUBS items, which read the same
keys. Channels are split into BD (a power of two) and BT more, so that 576 channels take 512 + 64 instead of 1,024.
Values that are the keys themselves (a latent cache) are read once. A tile's own keys may follow its list in one stream,
so that prompts need no kernel of their own. Letters, streams and items: see triton_kernels and triton_streams.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.attend import triton_merging as merging
from longreach.ops.attend import triton_streams as streams
from longreach.ops.attend.triton_kernels import _tanh
from longreach.ops.attend.triton_merging import LN2, LOG2E


@triton.jit
def _block(of, place, column, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Channels [FIRST, FIRST + WIDTH) of the vectors at `place`, 0 where not `column` and from D on."""
    d = FIRST + tl.arange(0, WIDTH)
    if FIRST + WIDTH > D:
        x = tl.load(of + place[:, None] + d[None, :], mask=column[:, None] & (d < D)[None, :], other=0.0)
    else:
        x = tl.load(of + place[:, None] + d[None, :], mask=column[:, None], other=0.0)
    return x


@triton.jit
def _listed(entry, j, end, top, over, listed, own, BLOCK: tl.constexpr, OWN_KEYS: tl.constexpr):
    """The slots of keys j of a list's stream, -1 for none: `listed` keys, then (OWN_KEYS) slots from `own` on."""
    slot = streams.slots_of(entry, j, tl.minimum(end, listed), top, over, BLOCK)
    if OWN_KEYS:
        slot = tl.where((j >= listed) & (j < end), own + j - listed, slot)
    return slot


@triton.jit
def _piece(
    item, begin, end, rows, memory, spans, lists, kept, scale, cap,
    layout: tl.constexpr, kinds: tl.constexpr, listing: tl.constexpr, form: tl.constexpr, keeping: tl.constexpr,
    PAGED: tl.constexpr, TABLED: tl.constexpr, PAGE: tl.constexpr, HULL: tl.constexpr, CAPPED: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, SUBS: tl.constexpr, SHARED: tl.constexpr, OWN_KEYS: tl.constexpr,
):  # fmt: skip
    """Units [begin, end) of one item's stream: (row [M], head [M], maximum [M], sum [M], weighted values [M, BD] and
    [M, BT])."""
    PARTS: tl.constexpr = form[0]
    AXIS: tl.constexpr = form[1]
    GROUP: tl.constexpr = form[2]
    OWN: tl.constexpr = form[3]
    EVICTED: tl.constexpr = form[4]
    SPANS: tl.constexpr = form[5]
    LISTS: tl.constexpr = listing is not None
    BLOCK: tl.constexpr = listing[1] if LISTS else 1
    WEIGHTED: tl.constexpr = listing[3] if LISTS else False
    SPLIT: tl.constexpr = kinds[4]
    SPLIT_RELATIVE: tl.constexpr = kinds[5]
    WRITE: tl.constexpr = keeping[0] if keeping is not None else False
    READ: tl.constexpr = not keeping[0] if keeping is not None else False
    VALUES: tl.constexpr = keeping[1] if keeping is not None else True
    HALVES: tl.constexpr = keeping[2] if keeping is not None else False
    REST: tl.constexpr = BT if BT else 16
    q_of, q_row, q_head, _, _, _, _ = rows
    k_of, k_page, k_head, k_slot, v_of, v_page, v_head, v_slot = memory[:8]
    table, table_row, p_of, p_page, p_head, group = memory[9:]
    part = item % PARTS
    axis = item // PARTS % AXIS
    tile = item // (PARTS * AXIS)
    m = tl.arange(0, M)
    row = streams.row_of(tile, m // GROUP, rows, layout)
    sequence, pos, seen = streams.sight(row, rows, memory, EVICTED)
    head = axis * GROUP + m % GROUP
    unit_head = axis // SUBS  # KV head or query head, as the selection says
    bound_head = head if OWN > 1 else unit_head + tl.zeros_like(head)
    kv_head = (axis * GROUP // group).to(tl.int64)
    seq = tl.max(sequence, 0)
    top = tl.max(seen, 0)
    if not READ:
        q_at = row.to(tl.int64) * q_row + head * q_head
        q = _block(q_of, q_at, row >= 0, 0, BD, D)
        if BT:
            q_rest = _block(q_of, q_at, row >= 0, BD, BT, D)
    if WRITE or READ:
        x_of, x_row, x_head, top_of, top_row, top_head, _, _, _ = kept
        SIDE: tl.constexpr = keeping[4]  # query heads of a KV head, side by side
        BESIDE: tl.constexpr = 8 if GROUP % 8 == 0 else 4 if GROUP % 4 == 0 else 2 - GROUP % 2
        aside = axis * GROUP % SIDE + m % GROUP
        x_at = row.to(tl.int64) * x_row + kv_head * x_head + aside
        top_at = row.to(tl.int64) * top_row + kv_head * top_head + aside
    k_at = k_of + kv_head * k_head
    v_at = v_of + kv_head * v_head
    pos_at = p_of + kv_head * p_head
    if not PAGED:  # one page a sequence
        page = seq.to(tl.int64)
        if TABLED:
            page = tl.load(table + page * table_row).to(tl.int64)
        k_at += page * k_page
        v_at += page * v_page
        pos_at += page * p_page
    pages = table + seq.to(tl.int64) * table_row

    lows, highs = (), ()
    firsts, lasts, counts = (), (), ()
    after = 0
    own = 0
    if LISTS:
        list_start, entries, over = streams.list_at(tl.max(row, 0), unit_head, lists, listing)
        listed = tl.where(over, top, entries * BLOCK)
        stream = listed
        if OWN_KEYS:
            own = tl.max(streams.bound(spans[0][0], row, row * 0, pos, True, False), 0)
            stream += tl.maximum(top - own, 0)
    else:
        for s in tl.static_range(SPANS):
            low, high = streams.span_of(s, spans, row, bound_head, pos, seen, part, kinds, EVICTED)
            lowest, highest = tl.min(low, 0), tl.max(high, 0)
            counts = counts + (after,)
            after += (tl.maximum(highest - lowest, 0) + UNIT - 1) // UNIT * UNIT
            lows, highs = lows + (low,), highs + (high,)
            firsts, lasts = firsts + (lowest,), lasts + (highest,)
    if SPLIT is not None:
        middle = streams.bound(spans[2], row, bound_head, pos, SPLIT, SPLIT_RELATIVE)

    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,) if VALUES else (M, BN), tl.float32)  # without values summed at the end
    acc = tl.zeros((M, BD), tl.float32)
    acc_rest = tl.zeros((M, REST), tl.float32)
    n = tl.arange(0, BN)
    begin, end = begin * UNIT, end * UNIT
    if LISTS:  # entries are read two blocks ahead and their pages one, so that no load waits for another
        end = tl.minimum(end, stream)
        entry = streams.entries_at(lists[0] + list_start, begin + n, tl.minimum(end, listed), over, BLOCK)
        slot = _listed(entry, begin + n, end, top, over, listed, own, BLOCK, OWN_KEYS)
        entry = streams.entries_at(lists[0] + list_start, begin + BN + n, tl.minimum(end, listed), over, BLOCK)
        if PAGED:
            page = streams.peek(pages + slot // PAGE, slot >= 0)
    elif PAGED:
        next_slot, _, next_last, _ = streams.stretch(begin + n, firsts, lasts, counts, SPANS)
        page = streams.peek(pages + next_slot // PAGE, (next_slot < next_last) & (begin + n < end))
    for at in tl.range(begin, end, BN, num_stages=STAGES):
        if LISTS:
            next_slot = _listed(entry, at + BN + n, end, top, over, listed, own, BLOCK, OWN_KEYS)
            if PAGED:
                next_page = streams.peek(pages + next_slot // PAGE, next_slot >= 0)
            entry = streams.entries_at(lists[0] + list_start, at + 2 * BN + n, tl.minimum(end, listed), over, BLOCK)
            column = slot >= 0
        else:
            if PAGED:
                next_slot, _, next_last, _ = streams.stretch(at + BN + n, firsts, lasts, counts, SPANS)
                next_page = streams.peek(pages + next_slot // PAGE, (next_slot < next_last) & (at + BN + n < end))
            slot, first, last, number_of = streams.stretch(at + n, firsts, lasts, counts, SPANS)
            column = (slot < last) & (at + n < end)
        if PAGED:  # where in memory; a slot that is no column is never followed
            at_k = page.to(tl.int64) * k_page + (slot % PAGE).to(tl.int64) * k_slot
            at_v = page.to(tl.int64) * v_page + (slot % PAGE).to(tl.int64) * v_slot
        else:
            at_k = slot.to(tl.int64) * k_slot
            at_v = slot.to(tl.int64) * v_slot
        if EVICTED:
            at_p = page.to(tl.int64) * p_page + slot % PAGE if PAGED else slot
            position = tl.load(pos_at + at_p, mask=column, other=streams.FAR).to(tl.int32)
        if LISTS:  # which keys each row takes
            take = column[None, :] & (slot[None, :] < seen[:, None])
        else:
            take = (slot[None, :] < 0) & (seen[:, None] < 0)
            before = take
            for s in tl.static_range(SPANS):
                named = (slot[None, :] >= lows[s][:, None]) & (slot[None, :] < highs[s][:, None])
                if EVICTED:
                    named = named & streams.placed(s, spans, row, bound_head, pos, position, kinds)
                if SPANS == 1:
                    take = named & column[None, :]
                else:
                    take = take | (named & ~before & (column & (number_of == s))[None, :])
                    before = before | named
        if EVICTED:
            take = take & (position[None, :] <= pos[:, None])
        if SPLIT is not None:
            if EVICTED and SPLIT_RELATIVE:
                take = take & ((position[None, :] < middle[:, None]) == (part == 0))
            elif LISTS:
                take = take & ((slot[None, :] < middle[:, None]) == (part == 0))
        if WRITE or READ:
            x_to = tl.max_contiguous(
                tl.multiple_of(x_at[:, None] + slot.to(tl.int64)[None, :] * SIDE, (BESIDE, 1)), (BESIDE, 1)
            )
            there = tl.max_constancy((row >= 0)[:, None] & column[None, :], (BESIDE, 1))
        if not HULL:  # read what some row takes, nothing else
            column = tl.max(take.to(tl.int32), 0) > 0
        if READ:
            KEPT: tl.constexpr = keeping[3]
            x = tl.load(x_of + x_to, mask=there, other=0.0).to(tl.float32)
            if HALVES:
                top_to = tl.max_contiguous(
                    tl.multiple_of(top_at[:, None] + (slot // KEPT).to(tl.int64)[None, :] * SIDE, (BESIDE, 1)),
                    (BESIDE, 1),
                )
                x += tl.load(top_of + top_to, mask=there, other=0.0)
            else:
                x = x * LOG2E
        else:
            k = _block(k_at, at_k, column, 0, BD, D)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            if BT:
                k_rest = _block(k_at, at_k, column, BD, BT, D)
                x = tl.dot(q_rest, tl.trans(k_rest), x, input_precision="ieee")
            if CAPPED:
                x = cap * LOG2E * _tanh(x * (scale / cap))
            else:
                x = x * (scale * LOG2E)
        if LISTS:
            if WEIGHTED:
                w = tl.load(lists[2] + list_start + (at + n) // BLOCK, mask=column & ~over, other=0.0)
                x += w.to(tl.float32)[None, :] * LOG2E
        x = tl.where(take, x, float("-inf"))
        best = tl.max(x, 1)
        if WRITE:
            if HALVES:
                largest = tl.where(best == float("-inf"), 0.0, best)
                tl.store(top_of + top_at + at // BN * SIDE, largest, mask=row >= 0)
                tl.store(x_of + x_to, (x - largest[:, None]).to(tl.float16), mask=there)
            else:
                tl.store(x_of + x_to, x * LN2, mask=there)
        higher = tl.maximum(peak, best)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(x - base[:, None])
        shrink = tl.exp2(peak - base)
        if VALUES:
            total = total * shrink + tl.sum(p, 1)
            if SHARED:
                v = k
            else:
                v = _block(v_at, at_v, column, 0, BD, D)
            p = p.to(v.dtype)
            acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
            if BT:
                if SHARED:
                    v_rest = k_rest
                else:
                    v_rest = _block(v_at, at_v, column, BD, BT, D)
                acc_rest = tl.dot(p, v_rest, acc_rest * shrink[:, None], input_precision="ieee")
        else:
            total = total * shrink[:, None] + p
        peak = higher
        if LISTS:
            slot = next_slot
        if PAGED:
            page = next_page
    if not VALUES:
        total = tl.sum(total, 1)
    return row, head, peak, total, acc, acc_rest


@triton.jit
def attend_wide(
    rows, memory, spans, lists, kept, result, scale, cap, items, programs,
    layout: tl.constexpr, kinds: tl.constexpr, listing: tl.constexpr, form: tl.constexpr, keeping: tl.constexpr,
    counting: tl.constexpr, PAGED: tl.constexpr, TABLED: tl.constexpr, PAGE: tl.constexpr, HULL: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, DEALT: tl.constexpr, I2: tl.constexpr, X: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, SUBS: tl.constexpr, SHARED: tl.constexpr, OWN_KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """attend. Arguments as attend_pieces has them, but keys are never 8-bit. BD + BT channels hold D. SUBS: items
    that a KV head's query heads are cut into. counting: `form` for lengths of streams, of whole KV heads where spans
    are. SHARED: values are the keys. OWN_KEYS: a tile's keys from spans[0][0], a bound, on follow its list.
    """
    out, lse, sink, pieces, ends_at, heads, row_count = result
    program = tl.program_id(0)
    d = tl.arange(0, BD)
    e = BD + tl.arange(0, BT if BT else 16)
    m = tl.arange(0, M)
    PARTS: tl.constexpr = form[0]
    GROUP: tl.constexpr = form[2]
    MR: tl.constexpr = layout[0] * GROUP
    VALUES: tl.constexpr = keeping[1] if keeping is not None else True
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if DEALT:
        number = tl.arange(0, I2)
        counted = number
        if form[1] != counting[1]:
            counted = number // (PARTS * SUBS) * PARTS + number % PARTS
        units = streams.units_of(counted, rows, memory, spans, lists, layout, kinds, listing, counting, X, UNIT)
        ends = tl.cumsum(tl.where(number < items, units, 0), 0)
        whole = tl.max(ends, 0)
        if program == 0:
            tl.store(ends_at + number, ends, mask=number < items)
        share = tl.minimum(whole, programs)  # programs that get any: then each one between two of an item has a piece
        begin = streams.dealt(tl.minimum(program, share), whole, tl.maximum(share, 1))
        stop = streams.dealt(tl.minimum(program + 1, share), whole, tl.maximum(share, 1))
        while begin < stop:
            item = tl.sum((ends <= begin).to(tl.int32), 0)
            start = tl.sum(tl.where(number == item - 1, ends, 0), 0)
            end = tl.minimum(tl.sum(tl.where(number == item, ends, 0), 0), stop)
            row, head, peak, total, acc, acc_rest = _piece(
                item, begin - start, end - start, rows, memory, spans, lists, kept, scale, cap,
                layout, kinds, listing, form, keeping, PAGED, TABLED, PAGE, HULL, CAPPED, M, BN, D, BD, BT, STAGES,
                UNIT, SUBS, SHARED, OWN_KEYS,
            )  # fmt: skip
            place = (program + item) * MR + m
            tl.store(pieces[0] + place, peak, mask=m < MR)
            tl.store(pieces[1] + place, total, mask=m < MR)
            if VALUES:
                at = pieces[2] + place.to(tl.int64)[:, None] * D
                tl.store(at + d[None, :], acc, mask=(m < MR)[:, None] & (d < D)[None, :])
                if BT:
                    tl.store(at + e[None, :], acc_rest, mask=(m < MR)[:, None] & (e < D)[None, :])
            begin = end
    else:
        item = items - 1 - program  # later tiles see more: long work first
        if OWN_KEYS:
            end = 1 << 26  # the stream's end is found there
        else:
            counted = item + tl.arange(0, 1)
            if form[1] != counting[1]:
                counted = counted // (PARTS * SUBS) * PARTS + counted % PARTS
            end = tl.sum(
                streams.units_of(counted, rows, memory, spans, lists, layout, kinds, listing, counting, X, UNIT), 0
            )
        row, head, peak, total, acc, acc_rest = _piece(
            item, 0, end, rows, memory, spans, lists, kept, scale, cap,
            layout, kinds, listing, form, keeping, PAGED, TABLED, PAGE, HULL, CAPPED, M, BN, D, BD, BT, STAGES,
            UNIT, SUBS, SHARED, OWN_KEYS,
        )  # fmt: skip
        shifted = row + item % PARTS * row_count
        there = (row >= 0) & (m < MR)
        merging.finish(shifted, head, peak, total, acc, sink, out, lse, heads, D, SUNK, VALUES, d, there)
        if BT:
            merging.finish(shifted, head, peak, total, acc_rest, sink, out, lse, heads, D, SUNK, VALUES, e, there)
