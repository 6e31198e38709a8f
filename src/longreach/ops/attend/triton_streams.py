# mypy: ignore-errors
"""What attend's kernels read: the stream of keys of each item, and how streams are dealt out to programs.

An *item* is what shares a stream of keys: the rows of one tile (one sequence each) under one KV head, or one query
head where lists belong to query heads. Its keys, in the order they are read, are its *stream*, measured in units of
UNIT keys. The streams of all items, laid end to end, are dealt out evenly to a fixed number of programs, from lengths
and spans in device memory; a program may hold the end of one item and the start of the next.

Letters as in ops/README.md; I items, X rows x heads with spans of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longreach.ops.triton_reads import INTERPRETED, peek

FAR = tl.constexpr((1 << 30) - 1)  # beyond any slot or position; two of them do not overflow


@triton.jit
def row_of(tile, t, rows, layout: tl.constexpr):
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
def sight(row, rows, memory, EVICTED: tl.constexpr):
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
def bound(bound, row, head, pos, TENSOR: tl.constexpr, RELATIVE: tl.constexpr):
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
def span_of(s: tl.constexpr, spans, row, head, pos, seen, part, kinds: tl.constexpr, EVICTED: tl.constexpr):
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
        low = tl.maximum(low, bound(spans[0][s], row, head, pos, START, START_RELATIVE))
    if not (EVICTED and STOP_RELATIVE):
        high = tl.minimum(high, bound(spans[1][s], row, head, pos, STOP, STOP_RELATIVE))
    if SPLIT is not None:
        if not (EVICTED and SPLIT_RELATIVE):
            middle = bound(spans[2], row, head, pos, SPLIT, SPLIT_RELATIVE)
            low = tl.where(part == 0, low, tl.maximum(low, middle))
            high = tl.where(part == 0, tl.minimum(high, middle), high)
    some = high > low
    return tl.where(some, low, FAR), tl.where(some, high, 0)


@triton.jit
def placed(s: tl.constexpr, spans, row, head, pos, position, kinds: tl.constexpr):
    """Which keys the relative bounds of span s name for each row, after eviction: those name positions, not slots."""
    START: tl.constexpr = kinds[0][s]
    STOP: tl.constexpr = kinds[1][s]
    START_RELATIVE: tl.constexpr = kinds[2][s]
    STOP_RELATIVE: tl.constexpr = kinds[3][s]
    named = (position[None, :] >= 0) & (pos[:, None] >= 0)
    if START_RELATIVE:
        x = bound(spans[0][s], row, head, pos, START, START_RELATIVE)
        named = named & (position[None, :] >= x[:, None])
    if STOP_RELATIVE:
        x = bound(spans[1][s], row, head, pos, STOP, STOP_RELATIVE)
        named = named & (position[None, :] < x[:, None])
    return named


@triton.jit
def list_at(row, head, lists, listing: tl.constexpr):
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
def units_of(
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
    row = row_of(tile[:, None], x // OWN, rows, layout)
    _, pos, seen = sight(row, rows, memory, EVICTED)
    if listing is None:
        head = axis[:, None] * OWN + x % OWN
        units = tl.zeros_like(item)
        for s in tl.static_range(SPANS):
            low, high = span_of(s, spans, row, head, pos, seen, part[:, None], kinds, EVICTED)
            first, last = tl.min(low, 1), tl.max(high, 1)
            units += (tl.maximum(last - first, 0) + UNIT - 1) // UNIT
    else:
        top = tl.max(row, 1)
        BLOCK: tl.constexpr = listing[1]
        _, entries, over = list_at(top, axis, lists, listing)
        keys = tl.where(over, tl.max(seen, 1), entries * BLOCK)
        units = tl.where(top >= 0, (keys + UNIT - 1) // UNIT, 0)
    return units


@triton.jit
def _fits(whole, share):
    """Whether units times programs is below 2^31: divisions of 64 bits take several times as long."""
    return whole.to(tl.float32) * share.to(tl.float32) < 2.0e9


@triton.jit
def dealt(program, whole, share):
    """The first of `whole` units that belongs to a program: p of P = `share` holds units [p W / P, (p + 1) W / P)."""
    if _fits(whole, share):
        first = program * whole // share
    else:
        first = (program.to(tl.int64) * whole // share).to(tl.int32)
    return first


@triton.jit
def holder(unit, whole, share):
    """The program that holds a unit: ((unit + 1) P - 1) / W."""
    if _fits(whole, share):
        program = ((unit + 1) * share - 1) // whole
    else:
        program = (((unit + 1).to(tl.int64) * share - 1) // whole).to(tl.int32)
    return program


@triton.jit
def soon(at, mask):
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
def entries_at(entries_at, j, end, over, BLOCK: tl.constexpr):
    """The list entries that keys j of a stream belong to."""
    return peek(entries_at + j // BLOCK, (j < end) & ~over).to(tl.int32)


@triton.jit
def slots_of(entry, j, end, top, over, BLOCK: tl.constexpr):
    """The slots of keys j of a list's stream, -1 for none."""
    slot = tl.where(over, j, entry * BLOCK + j % BLOCK)
    return tl.where((j < end) & (slot < top), slot, -1)


@triton.jit
def stretch(j, firsts, lasts, counts, SPANS: tl.constexpr):
    """Of keys j of a stream of spans: slot, where its span starts and stops, the span's number."""
    first, last, since, number = firsts[0], lasts[0], 0, 0
    for s in tl.static_range(1, SPANS):
        reached = j >= counts[s]
        first = tl.where(reached, firsts[s], first)
        last = tl.where(reached, lasts[s], last)
        since = tl.where(reached, counts[s], since)
        number = tl.where(reached, s, number)
    return j - since + first, first, last, number
