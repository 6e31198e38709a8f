"""The Triton kernels of attend: work divided inside the kernel, then results over the same keys' parts merged.

An *item* is what shares a stream of keys: the rows of one tile (one sequence each) under one KV head, or one query
head where lists belong to query heads. Its keys, in the order they are read, are its *stream*, measured in units of
UNIT keys. The streams of all items, laid end to end, are dealt out evenly to a fixed number of programs, from lengths
and spans in device memory; a program may hold the end of one item and the start of the next. What it holds of an item
is a *piece*, kept at index program + item (both only grow along the line, so no two pieces share an index), and
`merge_pieces` puts the pieces of a row together. A program reads its pieces in blocks of BN keys.

Logits are kept in base 2. Letters as in ops/README.md; M rows x heads of a tile, I items, X rows x heads with spans of
their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr((1 << 30) - 1)  # beyond any slot or position; two of them do not overflow


@triton.jit
def _row_of(tile, t, rows, layout: tl.constexpr):
    """Row number of entry t of a tile, -1 for none. layout: (T entries a tile, run width, whether there is a table)."""
    _, _, _, _, _, tiles, table = rows
    T: tl.constexpr = layout[0]
    WIDTH: tl.constexpr = layout[1]
    there = (t < T) & (tile < tiles)
    if layout[2]:
        row = tl.load(table + tile * T + t, mask=there, other=-1)
    else:
        a_run: tl.constexpr = (WIDTH + T - 1) // T
        offset = tile % a_run * T + t
        row = tl.where(there & (offset < WIDTH), tile // a_run * WIDTH + offset, -1)
    return row


@triton.jit
def _sight(row, rows, memory, EVICTED: tl.constexpr):
    """Sequence, position and slots a row can see (all 0 for row -1): slots [0, seen), or the filled ones."""
    _, _, _, seq_of, pos_of, _, _ = rows
    filled = memory[8]
    there = row >= 0
    seq = tl.load(seq_of + row, mask=there, other=0).to(tl.int32)
    pos = tl.minimum(tl.load(pos_of + row, mask=there, other=-1), FAR).to(tl.int32)
    seen = tl.load(filled + seq, mask=there, other=0).to(tl.int32)
    if not EVICTED:
        seen = tl.minimum(seen, pos + 1)
    return seq, pos, seen


@triton.jit
def _bound(bound, row, head, pos, TENSOR: tl.constexpr, RELATIVE: tl.constexpr):
    """One end of a span for each row and head. bound: (value, row stride, head stride)."""
    value, row_stride, head_stride = bound
    if TENSOR:
        at = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
        x = tl.load(value + at, mask=row >= 0, other=0)
        x = tl.minimum(tl.maximum(x, -FAR), FAR).to(tl.int32)
    else:
        x = tl.zeros_like(row) + value
    if RELATIVE:
        x += pos
    return x


@triton.jit
def _span(s: tl.constexpr, spans, row, head, pos, seen, part, kinds: tl.constexpr, EVICTED: tl.constexpr):
    """Slots [low, high) of span s for each row and head, cut to what the row sees and to the part of a split.

    After eviction relative bounds say nothing about slots: then all that the row sees is walked.
    """
    START: tl.constexpr = kinds[0][s]
    STOP: tl.constexpr = kinds[1][s]
    START_RELATIVE: tl.constexpr = kinds[2][s]
    STOP_RELATIVE: tl.constexpr = kinds[3][s]
    SPLIT: tl.constexpr = kinds[4]
    SPLIT_RELATIVE: tl.constexpr = kinds[5]
    low = tl.zeros_like(seen)
    high = seen
    if not (EVICTED and START_RELATIVE):
        low = tl.maximum(low, _bound(spans[0][s], row, head, pos, START, START_RELATIVE))
    if not (EVICTED and STOP_RELATIVE):
        high = tl.minimum(high, _bound(spans[1][s], row, head, pos, STOP, STOP_RELATIVE))
    if SPLIT is not None:
        if not (EVICTED and SPLIT_RELATIVE):
            middle = _bound(spans[2], row, head, pos, SPLIT, SPLIT_RELATIVE)
            low = tl.where(part == 0, low, tl.maximum(low, middle))
            high = tl.where(part == 0, tl.minimum(high, middle), high)
    some = high > low
    return tl.where(some, low, FAR), tl.where(some, high, 0)


@triton.jit
def _placed(s: tl.constexpr, spans, row, head, pos, position, kinds: tl.constexpr):
    """Which keys the relative bounds of span s name for each row, after eviction: those name positions, not slots."""
    START: tl.constexpr = kinds[0][s]
    STOP: tl.constexpr = kinds[1][s]
    START_RELATIVE: tl.constexpr = kinds[2][s]
    STOP_RELATIVE: tl.constexpr = kinds[3][s]
    named = (position[None, :] >= 0) & (pos[:, None] >= 0)
    if START_RELATIVE:
        x = _bound(spans[0][s], row, head, pos, START, START_RELATIVE)
        named = named & (position[None, :] >= x[:, None])
    if STOP_RELATIVE:
        x = _bound(spans[1][s], row, head, pos, STOP, STOP_RELATIVE)
        named = named & (position[None, :] < x[:, None])
    return named


@triton.jit
def _list(row, head, lists, listing: tl.constexpr):
    """(where a row's list starts, entries, whether it overflowed)."""
    _, count, _, list_of, head_of = lists
    HEADS: tl.constexpr = listing[0]
    PACKED: tl.constexpr = listing[2]
    CAPACITY: tl.constexpr = listing[4]
    SHARED: tl.constexpr = listing[5]
    MAPPED: tl.constexpr = listing[6]
    number = tl.maximum(row, 0)
    if SHARED:
        number = tl.load(list_of + number).to(tl.int32)
    place = number.to(tl.int64) * HEADS
    if MAPPED:
        place += tl.load(head_of + head).to(tl.int32)
    elif HEADS > 1:
        place += head
    if PACKED:
        start = tl.load(count + place).to(tl.int64)
        entries = (tl.load(count + place + 1) - start).to(tl.int32)
        over = entries < 0
    else:
        start = place * CAPACITY
        entries = tl.load(count + place).to(tl.int32)
        over = entries > CAPACITY
    return start, entries, over


@triton.jit
def _units_of(
    item, rows, memory, spans, lists, layout: tl.constexpr, kinds: tl.constexpr, listing: tl.constexpr,
    form: tl.constexpr, X: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Length of the stream of each item [I], in units."""
    PARTS: tl.constexpr = form[0]
    AXIS: tl.constexpr = form[1]
    OWN: tl.constexpr = form[3]  # query heads of an item that have spans of their own
    EVICTED: tl.constexpr = form[4]
    SPANS: tl.constexpr = form[5]
    part = item % PARTS
    axis = item // PARTS % AXIS
    tile = item // (PARTS * AXIS)
    x = tl.arange(0, X)[None, :]
    row = _row_of(tile[:, None], x // OWN, rows, layout)
    _, pos, seen = _sight(row, rows, memory, EVICTED)
    if listing is None:
        head = axis[:, None] * OWN + x % OWN
        units = tl.zeros_like(item)
        for s in tl.static_range(SPANS):
            low, high = _span(s, spans, row, head, pos, seen, part[:, None], kinds, EVICTED)
            first, last = tl.min(low, 1), tl.max(high, 1)
            units += (tl.maximum(last - first, 0) + UNIT - 1) // UNIT
    else:
        top = tl.max(row, 1)
        BLOCK: tl.constexpr = listing[1]
        _, entries, over = _list(top, axis, lists, listing)
        keys = tl.where(over, tl.max(seen, 1), entries * BLOCK)
        units = tl.where(top >= 0, (keys + UNIT - 1) // UNIT, 0)
    return units


@triton.jit
def _peek(at, mask):
    """tl.load of integers, 0 where masked, that the software pipeliner leaves where it stands."""
    if INTERPRETED:
        x = tl.load(at, mask=mask, other=0)
    elif at.dtype.element_ty == tl.int64:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; @p ld.global.b64 $0, [$1]; }",
            "=l,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int64, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=r,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _soon(at, mask):
    """Bring the cache lines at these addresses into L2. Gives 0, so that it stands somewhere."""
    if INTERPRETED:
        x = tl.zeros_like(mask.to(tl.int32))
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p prefetch.global.L2 [$1]; }",
            "=r,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _entries(entries_at, j, end, over, BLOCK: tl.constexpr):
    """The list entries that keys j of a stream belong to."""
    return _peek(entries_at + j // BLOCK, (j < end) & ~over).to(tl.int32)


@triton.jit
def _slots(entry, j, end, top, over, BLOCK: tl.constexpr):
    """The slots of keys j of a list's stream, -1 for none."""
    slot = tl.where(over, j, entry * BLOCK + j % BLOCK)
    return tl.where((j < end) & (slot < top), slot, -1)


@triton.jit
def _stretch(j, firsts, lasts, counts, SPANS: tl.constexpr):
    """Of keys j of a stream of spans: slot, where its span starts and stops, the span's number."""
    first, last, since, number = firsts[0], lasts[0], 0, 0
    for s in tl.static_range(1, SPANS):
        reached = j >= counts[s]
        first = tl.where(reached, firsts[s], first)
        last = tl.where(reached, lasts[s], last)
        since = tl.where(reached, counts[s], since)
        number = tl.where(reached, s, number)
    return j - since + first, first, last, number


@triton.jit
def _tanh(x):
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def _in_two(
    tile, axis, rows, layout: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """Queries in two int8 terms, q = step (254 high + low): (high [M, BD], low, step [M]).

    Where 8 rows are enough high is [16, BD] with the low terms in its last 8 rows (and low the same), so that one
    product gives both.
    """
    ROWS: tl.constexpr = 16 if M == 8 else M
    q_of, q_row, q_head, _, _, _, _ = rows
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    m = r % M
    row = _row_of(tile, m // GROUP, rows, layout)
    q = tl.load(
        q_of + row.to(tl.int64)[:, None] * q_row + (axis * GROUP + m % GROUP)[:, None] * q_head + d[None, :],
        mask=(row >= 0)[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(tl.float32)
    step = tl.max(tl.abs(q), 1) / 32258.0  # 127 * 254
    whole = tl.floor(q / tl.where(step > 0, step, 1.0)[:, None] + 0.5)
    high = tl.floor(whole / 254.0 + 0.5)
    low = whole - 254.0 * high
    if M == 8:
        high = tl.where((r < 8)[:, None], high, low)
        step = tl.max(tl.reshape(step, (2, 8)), 0)
    return high.to(tl.int8), low.to(tl.int8), step


@triton.jit
def _dot_in_two(high, low, k, M: tl.constexpr, BN: tl.constexpr):
    """(254 high + low) k, exact in int32 up to 256 channels, as fp32 [M, BN]."""
    if M == 8:
        both = tl.reshape(tl.dot(high, k), (2, 8, BN))
        weight = tl.where(tl.arange(0, 2) == 0, 254, 1)
        x = tl.sum(both * weight[:, None, None], 0)
    else:
        x = tl.dot(high, k) * 254 + tl.dot(low, k)
    return x.to(tl.float32)


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
    q_of, q_row, q_head, _, _, _, _ = rows
    k_of, k_page, k_head, k_slot, v_of, v_page, v_head, v_slot = memory[:8]
    filled, table, table_row, p_of, p_page, p_head, group = memory[8:]
    part = item % PARTS
    axis = item // PARTS % AXIS
    tile = item // (PARTS * AXIS)
    m = tl.arange(0, M)
    row = _row_of(tile, m // GROUP, rows, layout)
    sequence, pos, seen = _sight(row, rows, memory, EVICTED)
    head = axis * GROUP + m % GROUP
    bound_head = head if OWN > 1 else axis + tl.zeros_like(head)  # kv head or query head, as the selection says
    kv_head = (axis * GROUP // group).to(tl.int64)
    seq = tl.max(sequence, 0)
    top = tl.max(seen, 0)
    d = tl.arange(0, BD)
    inside = d < D
    if CODED:
        high_q, low_q, step = _in_two(tile, axis, rows, layout, GROUP, M, D, BD)
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
        list_start, entries, over = _list(tl.max(row, 0), axis, lists, listing)
        stream = tl.where(over, top, entries * BLOCK)
    else:
        for s in tl.static_range(SPANS):
            low, high = _span(s, spans, row, bound_head, pos, seen, part, kinds, EVICTED)
            lowest, highest = tl.min(low, 0), tl.max(high, 0)
            counts = counts + (after,)
            after += (tl.maximum(highest - lowest, 0) + UNIT - 1) // UNIT * UNIT
            lows, highs = lows + (low,), highs + (high,)
            firsts, lasts = firsts + (lowest,), lasts + (highest,)
    if SPLIT is not None:
        middle = _bound(spans[2], row, bound_head, pos, SPLIT, SPLIT_RELATIVE)

    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, BD), tl.float32)
    n = tl.arange(0, BN)
    begin, end = begin * UNIT, end * UNIT
    if LISTS:  # entries are read two blocks ahead and their pages one, so that no load waits for another
        end = tl.minimum(end, stream)
        line = begin + n * 32  # 32 entries of 4 bytes; more of them than the first rounds need
        _soon(lists[0] + list_start + line // BLOCK, (line < end) & (n < 32) & ~over)
        entry = _entries(lists[0] + list_start, begin + n, end, over, BLOCK)
        slot = _slots(entry, begin + n, end, top, over, BLOCK)
        entry = _entries(lists[0] + list_start, begin + BN + n, end, over, BLOCK)
        if PAGED:
            page = _peek(pages + slot // PAGE, slot >= 0)
    elif PAGED:
        next_slot, _, next_last, _ = _stretch(begin + n, firsts, lasts, counts, SPANS)
        page = _peek(pages + next_slot // PAGE, (next_slot < next_last) & (begin + n < end))
    if CODED:  # scales are read one block ahead, pages two
        next_slot, _, next_last, _ = _stretch(begin + n, firsts, lasts, counts, SPANS)
        near = (next_slot < next_last) & (begin + n < end)
        if PAGED:
            size = _peek(s_of + page.to(tl.int64) * s_page + next_slot % PAGE, near)
            next_slot, _, next_last, _ = _stretch(begin + BN + n, firsts, lasts, counts, SPANS)
            next_page = _peek(pages + next_slot // PAGE, (next_slot < next_last) & (begin + BN + n < end))
        else:
            size = _peek(s_of + next_slot, near)
    for at in tl.range(begin, end, BN, num_stages=STAGES):
        if LISTS:  # asked for now, needed in the next round
            next_slot = _slots(entry, at + BN + n, end, top, over, BLOCK)
            if PAGED:
                next_page = _peek(pages + next_slot // PAGE, next_slot >= 0)
            entry = _entries(lists[0] + list_start, at + 2 * BN + n, end, over, BLOCK)
            line = at + (32 + n) * 32
            _soon(lists[0] + list_start + line // BLOCK, (line < end) & (n * 32 < BN) & ~over)
        elif CODED:
            next_slot, _, next_last, _ = _stretch(at + BN + n, firsts, lasts, counts, SPANS)
            near = (next_slot < next_last) & (at + BN + n < end)
            if PAGED:
                next_size = _peek(s_of + next_page.to(tl.int64) * s_page + next_slot % PAGE, near)
                far_slot, _, far_last, _ = _stretch(at + 2 * BN + n, firsts, lasts, counts, SPANS)
                far_page = _peek(pages + far_slot // PAGE, (far_slot < far_last) & (at + 2 * BN + n < end))
            else:
                next_size = _peek(s_of + next_slot, near)
                line, _, line_last, _ = _stretch(at + 4 * BN + n * 32, firsts, lasts, counts, SPANS)
                _soon(s_of + line, (line < line_last) & (at + 4 * BN + n * 32 < end) & (n * 32 < BN))
        elif PAGED:
            next_slot, _, next_last, _ = _stretch(at + BN + n, firsts, lasts, counts, SPANS)
            next_page = _peek(pages + next_slot // PAGE, (next_slot < next_last) & (at + BN + n < end))
        if LISTS:
            column = slot >= 0
        else:
            slot, first, last, number_of = _stretch(at + n, firsts, lasts, counts, SPANS)
            column = (slot < last) & (at + n < end)
        # where in memory; a slot that is no column is never followed
        if PAGED:
            at_k = page.to(tl.int64) * k_page + (slot % PAGE).to(tl.int64) * k_slot
            at_v = page.to(tl.int64) * v_page + (slot % PAGE).to(tl.int64) * v_slot
        else:
            at_k = slot.to(tl.int64) * k_slot
            at_v = slot.to(tl.int64) * v_slot
        if EVICTED:
            at_p = page.to(tl.int64) * p_page + slot % PAGE if PAGED else slot
            position = tl.load(pos_at + at_p, mask=column, other=FAR).to(tl.int32)
        # which keys each row takes
        if LISTS:
            take = column[None, :] & (slot[None, :] < seen[:, None])
        else:
            take = (slot[None, :] < 0) & (seen[:, None] < 0)
            before = take
            for s in tl.static_range(SPANS):
                named = (slot[None, :] >= lows[s][:, None]) & (slot[None, :] < highs[s][:, None])
                if EVICTED:
                    named = named & _placed(s, spans, row, bound_head, pos, position, kinds)
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
            k = tl.load(
                k_at + at_k[None, :] + d[:, None],
                mask=column[None, :] & inside[:, None] if BD != D else column[None, :],
                other=0 if CODED else 0.0,
            )
            if CODED:
                x = _dot_in_two(high_q, low_q, k, M, BN) * (step[:, None] * size.to(tl.float32, bitcast=True)[None, :])
            else:
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
        total = total * shrink + tl.sum(p, 1)
        if VALUES:
            v = tl.load(
                v_at + at_v[:, None] + d[None, :],
                mask=column[:, None] & inside[None, :] if BD != D else column[:, None],
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
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
    return row, head, peak, total, acc


@triton.jit
def _finish(
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
    log-weight, list_of, head_of); kept: (), or (x of Logits and its row and KV-head strides, top and its, the scale
    of 8-bit keys and its page and head strides);
    result: (out, lse, sink, pieces, ends, heads, rows).

    layout: see _row_of. kinds: for each span whether start and stop are tensors, whether they are relative, and the
    same two of the split (None, None without one). listing: None for spans, else (heads, block, packed or not,
    weighted or not, capacity, shared or not, heads mapped or not). form: (parts, head axis, query heads an item, those
    with spans of their own, whether slots have positions of their own, spans). keeping: None, or (logits are written,
    not read in place of keys; values are read; logits are fp16; slots of a block of theirs; query heads a KV head; keys
    are 8-bit): who writes has BN = UNIT = a block of theirs and one dense span. PAGED: more than one page a sequence,
    of PAGE slots. TABLED: whether there is a block table. HULL: the slots that the rows of an item take form one run.
    CHAINED: launched while the kernel before still runs (programmatic dependent launch), so it has to wait for it.
    DEALT: streams are dealt out evenly and pieces kept; else a program does one item and writes its result.
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
        units = _units_of(number, rows, memory, spans, lists, layout, kinds, listing, form, X, UNIT)
        ends = tl.cumsum(tl.where(number < items, units, 0), 0)
        whole = tl.max(ends, 0).to(tl.int64)
        if program == 0:
            tl.store(ends_at + number, ends, mask=number < items)
        share = tl.minimum(whole, programs)  # programs that get any: then each one between two of an item has a piece
        begin = (tl.minimum(program, share) * whole // tl.maximum(share, 1)).to(tl.int32)
        stop = (tl.minimum(program + 1, share) * whole // tl.maximum(share, 1)).to(tl.int32)
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
        end = tl.sum(_units_of(number, rows, memory, spans, lists, layout, kinds, listing, form, X, UNIT), 0)
        row, head, peak, total, acc = _piece(
            item, 0, end, rows, memory, spans, lists, kept, scale, cap,
            layout, kinds, listing, form, keeping, PAGED, TABLED, PAGE, HULL, CAPPED, M, BN, D, BD, STAGES, UNIT,
        )  # fmt: skip
        shifted = row + item % form[0] * row_count
        _finish(shifted, head, peak, total, acc, sink, out, lse, heads, D, SUNK, VALUES, d, (row >= 0) & (m < MR))


@triton.jit
def _gathered(
    item, m, items, programs, pieces, ends_at, MR: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Maximum [1], sum [1] and weighted values [1, BD] of row x head m of an item, from its pieces, C at a time."""
    start = tl.load(ends_at + item - 1, mask=item > 0, other=0).to(tl.int64)
    end = tl.load(ends_at + item).to(tl.int64)
    whole = tl.maximum(tl.load(ends_at + items - 1).to(tl.int64), 1)
    # program p of P holds units [p W / P, (p + 1) W / P), so unit c is with program ((c + 1) P - 1) / W
    share = tl.minimum(whole, programs)
    first = ((start + 1) * share - 1) // whole
    last = (end * share - 1) // whole
    count = tl.where(end > start, last - first + 1, 0).to(tl.int32)
    d = tl.arange(0, BD)
    c = tl.arange(0, C)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BD), tl.float32)
    for chunk in range(0, count, C):
        there = chunk + c < count
        place = (first + item + chunk + c) * MR + m
        peaks = tl.load(pieces[0] + place, mask=there, other=float("-inf"))
        totals = tl.load(pieces[1] + place, mask=there, other=0.0)
        if VALUES:
            at = pieces[2] + place[:, None] * D + d[None, :]
            parts = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
        high = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(high == float("-inf"), 0.0, high)
        weight = tl.exp2(peaks - base)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(totals * weight, 0)
        if VALUES:
            acc = acc * shrink[:, None] + tl.sum(parts * weight[:, None], 0)[None, :]
        peak = high
    return peak, total, acc


@triton.jit
def merge_pieces(
    rows, result, items, programs, layout: tl.constexpr, form: tl.constexpr, SUNK: tl.constexpr,
    VALUES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The result of one row and head from the pieces of its item, C at a time."""
    out, lse, sink, pieces, ends_at, heads, row_count = result
    GROUP: tl.constexpr = form[2]
    MR: tl.constexpr = layout[0] * GROUP
    item = tl.program_id(0) // MR
    m = tl.program_id(0) % MR
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    d = tl.arange(0, BD)
    peak, total, acc = _gathered(item, m, items, programs, pieces, ends_at, MR, VALUES, D, BD, C)
    tile = item // (form[0] * form[1])
    t = tl.zeros((1,), tl.int32) + m // GROUP
    row = _row_of(tile, t, rows, layout)
    head = tl.zeros((1,), tl.int32) + item // form[0] % form[1] * GROUP + m % GROUP
    shifted = row + item % form[0] * row_count
    _finish(shifted, head, peak, total, acc, sink, out, lse, heads, D, SUNK, VALUES, d, row >= 0)
