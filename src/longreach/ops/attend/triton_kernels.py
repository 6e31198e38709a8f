# mypy: ignore-errors
"""The Triton kernel of attend: a program goes through what it was dealt of streams, and keeps what came of it.

What a program holds of an item is a *piece*, kept at index program + item (both only grow along the line, so no two
pieces share an index); triton_merging puts the pieces of a row together. A program reads its pieces in blocks of BN
keys. Streams and items: see triton_streams.

Logits are kept in base 2. Letters as in ops/README.md; M rows x heads of a tile, I items, X rows x heads with spans of
their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.attend import triton_merging as merging
from longreach.ops.attend import triton_streams as streams
from longreach.ops.attend.triton_merging import LN2, LOG2E


@triton.jit
def _tanh(x):
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def _in_two(
    tile, axis, rows, layout: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """Queries in two int8 terms each, q = step (254 high + low), side by side: (terms [2 M, BD], step [M])."""
    q_of, q_row, q_head, _, _, _, _ = rows
    r = tl.arange(0, 2 * M)
    d = tl.arange(0, BD)
    m = r // 2
    row = streams.row_of(tile, m // GROUP, rows, layout)
    q = tl.load(
        q_of + row.to(tl.int64)[:, None] * q_row + (axis * GROUP + m % GROUP)[:, None] * q_head + d[None, :],
        mask=(row >= 0)[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(tl.float32)
    step = tl.max(tl.abs(q), 1) / 32258.0  # 127 * 254
    whole = tl.floor(q / tl.where(step > 0, step, 1.0)[:, None] + 0.5)
    high = tl.floor(whole / 254.0 + 0.5)
    terms = tl.where((r % 2 == 0)[:, None], high, whole - 254.0 * high)
    return terms.to(tl.int8), tl.max(tl.reshape(step, (M, 2)), 1)


@triton.jit
def _dot_in_two(k, terms, M: tl.constexpr, BN: tl.constexpr):
    """(254 high + low) k, exact in int32 up to 256 channels, as fp32 [M, BN]. k: [BN, BD]."""
    both = tl.reshape(tl.dot(k, tl.trans(terms)), (BN, M, 2))
    x = tl.sum(both * tl.where(tl.arange(0, 2) == 0, 254, 1)[None, None, :], 2)
    return tl.trans(x.to(tl.float32))


@triton.jit
def _piece(
    item, begin, end, rows, memory, spans, lists, kept, scale, cap,
    layout: tl.constexpr, kinds: tl.constexpr, listing: tl.constexpr, form: tl.constexpr, keeping: tl.constexpr,
    PAGED: tl.constexpr, TABLED: tl.constexpr, PAGE: tl.constexpr, HULL: tl.constexpr,
    CAPPED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Units [begin, end) of one item's stream: (row [M], head [M], maximum [M], sum [M], weighted values [M, BD])."""
    PARTS: tl.constexpr = form[0]
    AXIS: tl.constexpr = form[1]
    GROUP: tl.constexpr = form[2]
    EVICTED: tl.constexpr = form[4]
    OWN: tl.constexpr = form[3]
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
    CODED: tl.constexpr = keeping[5] if keeping is not None else False  # keys are 8-bit
    FIRST: tl.constexpr = CODED or M == 8  # keys are the first operand of products: fewer of them where rows are few
    NEARBY: tl.constexpr = form[6] and SPANS == 1 and not (LISTS or PAGED)  # keys of a block lie at even distances
    q_of, q_row, q_head, _, _, _, _ = rows
    k_of, k_page, k_head, k_slot, v_of, v_page, v_head, v_slot = memory[:8]
    filled, table, table_row, p_of, p_page, p_head, group = memory[8:]
    part = item % PARTS
    axis = item // PARTS % AXIS
    tile = item // (PARTS * AXIS)
    m = tl.arange(0, M)
    row = streams.row_of(tile, m // GROUP, rows, layout)
    sequence, pos, seen = streams.sight(row, rows, memory, EVICTED)
    head = axis * GROUP + m % GROUP
    bound_head = head if OWN > 1 else axis + tl.zeros_like(head)  # kv head or query head, as the selection says
    kv_head = (axis * GROUP // group).to(tl.int64)
    seq = tl.max(sequence, 0)
    top = tl.max(seen, 0)
    d = tl.arange(0, BD)
    inside = d < D
    if CODED:
        terms, step = _in_two(tile, axis, rows, layout, GROUP, M, D, BD)
    elif not READ:
        q = tl.load(
            q_of + row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + d[None, :],
            mask=(row >= 0)[:, None] & inside[None, :],
            other=0.0,
        )
    if WRITE or READ:
        x_of, x_row, x_head, top_of, top_row, top_head, s_of, s_page, s_head = kept
        SIDE: tl.constexpr = keeping[4]  # query heads of a KV head, side by side
        # of these, so many lie in consecutive entries of the tile and on a multiple of their bytes
        BESIDE: tl.constexpr = (8 if SIDE % 8 == 0 else 4 if SIDE % 4 == 0 else 2 - SIDE % 2) if GROUP == SIDE else 1
        aside = m % GROUP if GROUP == SIDE else tl.zeros_like(m) + axis % SIDE
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
        if CODED:
            s_of += page * s_page
    if CODED:
        s_of += kv_head * s_head
    pages = table + seq.to(tl.int64) * table_row

    # where the item's spans lie: for each row, their hull, and where they start in the stream
    lows, highs = (), ()
    firsts, lasts, counts = (), (), ()
    after = 0
    if LISTS:
        list_start, entries, over = streams.list_at(tl.max(row, 0), axis, lists, listing)
        stream = tl.where(over, top, entries * BLOCK)
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
    acc = tl.zeros((BD, M) if FIRST else (M, BD), tl.float32)
    n = tl.arange(0, BN)
    begin, end = begin * UNIT, end * UNIT
    if LISTS:  # entries are read two blocks ahead and their pages one, so that no load waits for another
        end = tl.minimum(end, stream)
        line = begin + n * 32  # 32 entries of 4 bytes; more of them than the first rounds need
        streams.soon(lists[0] + list_start + line // BLOCK, (line < end) & (n < 32) & ~over)
        entry = streams.entries_at(lists[0] + list_start, begin + n, end, over, BLOCK)
        slot = streams.slots_of(entry, begin + n, end, top, over, BLOCK)
        entry = streams.entries_at(lists[0] + list_start, begin + BN + n, end, over, BLOCK)
        if PAGED:
            page = streams.peek(pages + slot // PAGE, slot >= 0)
    elif PAGED:
        next_slot, _, next_last, _ = streams.stretch(begin + n, firsts, lasts, counts, SPANS)
        page = streams.peek(pages + next_slot // PAGE, (next_slot < next_last) & (begin + n < end))
    if CODED:  # scales are read one block ahead, pages two
        next_slot, _, next_last, _ = streams.stretch(begin + n, firsts, lasts, counts, SPANS)
        near = (next_slot < next_last) & (begin + n < end)
        if PAGED:
            size = streams.peek(s_of + page.to(tl.int64) * s_page + next_slot % PAGE, near)
            next_slot, _, next_last, _ = streams.stretch(begin + BN + n, firsts, lasts, counts, SPANS)
            next_page = streams.peek(pages + next_slot // PAGE, (next_slot < next_last) & (begin + BN + n < end))
        else:
            size = streams.peek(s_of + next_slot, near)
    for at in tl.range(begin, end, BN, num_stages=STAGES):
        if LISTS:  # asked for now, needed in the next round
            next_slot = streams.slots_of(entry, at + BN + n, end, top, over, BLOCK)
            if PAGED:
                next_page = streams.peek(pages + next_slot // PAGE, next_slot >= 0)
            entry = streams.entries_at(lists[0] + list_start, at + 2 * BN + n, end, over, BLOCK)
            line = at + (32 + n) * 32
            streams.soon(lists[0] + list_start + line // BLOCK, (line < end) & (n * 32 < BN) & ~over)
        elif CODED:
            next_slot, _, next_last, _ = streams.stretch(at + BN + n, firsts, lasts, counts, SPANS)
            near = (next_slot < next_last) & (at + BN + n < end)
            if PAGED:
                next_size = streams.peek(s_of + next_page.to(tl.int64) * s_page + next_slot % PAGE, near)
                far_slot, _, far_last, _ = streams.stretch(at + 2 * BN + n, firsts, lasts, counts, SPANS)
                far_page = streams.peek(pages + far_slot // PAGE, (far_slot < far_last) & (at + 2 * BN + n < end))
            else:
                next_size = streams.peek(s_of + next_slot, near)
                line, _, line_last, _ = streams.stretch(at + 4 * BN + n * 32, firsts, lasts, counts, SPANS)
                streams.soon(s_of + line, (line < line_last) & (at + 4 * BN + n * 32 < end) & (n * 32 < BN))
        elif PAGED:
            next_slot, _, next_last, _ = streams.stretch(at + BN + n, firsts, lasts, counts, SPANS)
            next_page = streams.peek(pages + next_slot // PAGE, (next_slot < next_last) & (at + BN + n < end))
        if LISTS:
            column = slot >= 0
        elif NEARBY:
            slot = at + firsts[0] + n
            column = n < tl.minimum(lasts[0] - firsts[0], end) - at
        else:
            slot, first, last, number_of = streams.stretch(at + n, firsts, lasts, counts, SPANS)
            column = (slot < last) & (at + n < end)
        # where in memory; a slot that is no column is never followed
        k_now, v_now = k_at, v_at
        if NEARBY:  # what changes from block to block is the same for all keys
            k_now += (at + firsts[0]).to(tl.int64) * k_slot
            v_now += (at + firsts[0]).to(tl.int64) * v_slot
            at_k, at_v = n * k_slot, n * v_slot
        elif PAGED:
            at_k = page.to(tl.int64) * k_page + (slot % PAGE).to(tl.int64) * k_slot
            at_v = page.to(tl.int64) * v_page + (slot % PAGE).to(tl.int64) * v_slot
        else:
            at_k = slot.to(tl.int64) * k_slot
            at_v = slot.to(tl.int64) * v_slot
        if EVICTED:
            at_p = page.to(tl.int64) * p_page + slot % PAGE if PAGED else slot
            position = tl.load(pos_at + at_p, mask=column, other=streams.FAR).to(tl.int32)
        # which keys each row takes
        if LISTS:
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
            if FIRST:
                k = tl.load(
                    k_now + at_k[:, None] + d[None, :],
                    mask=column[:, None] & inside[None, :] if BD != D else column[:, None],
                    other=0 if CODED else 0.0,
                )
                if CODED:
                    x = _dot_in_two(k, terms, M, BN) * (step[:, None] * size.to(tl.float32, bitcast=True)[None, :])
                else:
                    x = tl.trans(tl.dot(k, tl.trans(q)))
            else:
                k = tl.load(
                    k_now + at_k[None, :] + d[:, None],
                    mask=column[None, :] & inside[:, None] if BD != D else column[None, :],
                    other=0.0,
                )
                x = tl.dot(q, k, input_precision="ieee")
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
            if FIRST:
                v = tl.load(
                    v_now + at_v[None, :] + d[:, None],
                    mask=column[None, :] & inside[:, None] if BD != D else column[None, :],
                    other=0.0,
                )
                acc = tl.dot(v, tl.trans(p.to(v.dtype)), acc * shrink[None, :])
            else:
                v = tl.load(
                    v_now + at_v[:, None] + d[None, :],
                    mask=column[:, None] & inside[None, :] if BD != D else column[:, None],
                    other=0.0,
                )
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        else:
            total = total * shrink[:, None] + p
        peak = higher
        if LISTS:
            slot = next_slot
        if CODED:
            size = next_size
            if PAGED:  # chosen anew: loops that hand on a value untouched for two rounds are not pipelined
                page = tl.where(near, next_page, 0)
                next_page = far_page
        elif PAGED:
            page = next_page
    if not VALUES:
        total = tl.sum(total, 1)
    return row, head, peak, total, tl.trans(acc) if FIRST else acc


@triton.jit
def attend_pieces(
    rows, memory, spans, lists, kept, result, scale, cap, items, programs,
    layout: tl.constexpr, kinds: tl.constexpr, listing: tl.constexpr, form: tl.constexpr, keeping: tl.constexpr,
    PAGED: tl.constexpr, TABLED: tl.constexpr, PAGE: tl.constexpr, HULL: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, DEALT: tl.constexpr, I2: tl.constexpr, X: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """attend. rows: (q, row and head stride, seq, pos, tiles, table of tiles); memory: (k and its
    strides, v and its strides, filled, block table, its row stride, slot_pos, its page and head stride, query heads per
    KV head);
    spans: (starts, stops, split), each bound (value, row stride, head stride); lists: (index, count or offsets,
    log-weight, row_to_list, head_map); kept: (), or (x of Logits and its row and KV-head strides, top and its, the
    scale of 8-bit keys and its page and head strides);
    result: (out, lse, sink, pieces, ends, heads, rows).

    layout: see _row_of. kinds: for each span whether start and stop are tensors, whether they are relative, and the
    same two of the split (None, None without one). listing: None for spans, else (heads, block, packed or not,
    weighted or not, capacity, shared or not, heads mapped or not). form: (parts, head axis, query heads an item,
    those with spans of their own, whether slots have positions of their own, spans, whether slots are so close that
    a block's offsets fit 32 bits). keeping: None, or (logits are written, not read in place of keys; values are
    read; logits are fp16; slots of a block of theirs; query heads a KV head; keys are 8-bit): who writes has BN =
    UNIT = a block of theirs and one dense span. PAGED: more than one page a sequence, of PAGE slots. TABLED:
    whether there is a block table. HULL: the slots that the rows of an item take form one run. CHAINED: launched
    while the kernel before still runs (programmatic dependent launch), so it has to wait for it. DEALT: streams are
    dealt out evenly and pieces kept; else a program does one item and writes its result.
    """
    out, lse, sink, pieces, ends_at, heads, row_count = result
    program = tl.program_id(0)
    d = tl.arange(0, BD)
    m = tl.arange(0, M)
    GROUP: tl.constexpr = form[2]
    MR: tl.constexpr = layout[0] * GROUP
    VALUES: tl.constexpr = keeping[1] if keeping is not None else True
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if DEALT:
        number = tl.arange(0, I2)
        units = streams.units_of(number, rows, memory, spans, lists, layout, kinds, listing, form, X, UNIT)
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
            row, head, peak, total, acc = _piece(
                item, begin - start, end - start, rows, memory, spans, lists, kept, scale, cap,
                layout, kinds, listing, form, keeping, PAGED, TABLED, PAGE, HULL, CAPPED, M, BN, D, BD, STAGES, UNIT,
            )  # fmt: skip
            place = (program + item) * MR + m
            tl.store(pieces[0] + place, peak, mask=m < MR)
            tl.store(pieces[1] + place, total, mask=m < MR)
            if VALUES:
                tl.store(
                    pieces[2] + place.to(tl.int64)[:, None] * D + d[None, :],
                    acc,
                    mask=(m < MR)[:, None] & (d < D)[None, :],
                )
            begin = end
    else:
        item = items - 1 - program  # later tiles see more: long work first
        number = item + tl.arange(0, 1)
        end = tl.sum(streams.units_of(number, rows, memory, spans, lists, layout, kinds, listing, form, X, UNIT), 0)
        row, head, peak, total, acc = _piece(
            item, 0, end, rows, memory, spans, lists, kept, scale, cap,
            layout, kinds, listing, form, keeping, PAGED, TABLED, PAGE, HULL, CAPPED, M, BN, D, BD, STAGES, UNIT,
        )  # fmt: skip
        shifted = row + item % form[0] * row_count
        merging.finish(
            shifted, head, peak, total, acc, sink, out, lse, heads, D, SUNK, VALUES, d, (row >= 0) & (m < MR)
        )
