# mypy: ignore-errors
"""Triton kernels that put keys into tables: by codes, in blocks while decoding, and in whole segments of a prompt."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.simhash.triton_kernels import _coded, _directions, _place


@triton.jit
def _forget(place, edges, kept, cursor, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr):
    """Remove a segment's ids from `kept` on. Ids ascend in a bucket, so those that stay are its first ones."""
    lane, wide = tl.arange(0, BN), tl.arange(0, BB)
    total = tl.full((), 0, tl.int32)
    for b in range(0, BUCKETS, BB):
        there = b + wide < BUCKETS
        first = tl.load(edges + b + wide, mask=there, other=0).to(tl.int32)
        low, high = first, tl.load(edges + b + wide + 1, mask=there, other=0).to(tl.int32)
        while tl.max(high - low, 0) > 0:  # the first id of the bucket that goes
            middle = (low + high) // 2
            i = tl.load(place + middle, mask=low < high, other=0).to(tl.int32)
            goes = (i >= kept) | (low >= high)
            low, high = tl.where(goes, low, middle + 1), tl.where(goes, tl.minimum(middle, high), high)
        stays = low - first
        tl.store(cursor + b + wide, total + tl.cumsum(stays, 0) - stays, mask=there)
        total += tl.sum(stays, 0)
    tl.debug_barrier()
    for p in range(0, total, BN):
        there = p + lane < total
        bucket = _bucket_of(cursor, p + lane, there, BUCKETS, BN)
        begin = tl.load(cursor + bucket, mask=there, other=0)
        old = tl.load(edges + bucket, mask=there, other=0).to(tl.int32)
        i = tl.load(place + old + p + lane - begin, mask=there, other=0)
        tl.debug_barrier()  # all have read what others write over
        tl.store(place + p + lane, i, mask=there)
        tl.debug_barrier()
    for b in range(0, BUCKETS, BB):
        there = b + wide < BUCKETS
        begin = tl.load(cursor + b + wide, mask=there, other=0)
        tl.store(edges + b + wide, begin.to(edges.dtype.element_ty), mask=there)
    tl.store(edges + BUCKETS, total.to(edges.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def _bucket_of(edges, at, there, BUCKETS: tl.constexpr, BN: tl.constexpr):
    """The last bucket that begins at or before `at`."""
    low, step = tl.zeros([BN], tl.int32), BUCKETS // 2
    while step > 0:
        high = low + step
        low = tl.where(tl.load(edges + high, mask=there, other=0).to(tl.int32) <= at, high, low)
        step //= 2
    return low


@triton.jit
def _count_new(codes, stride, at, end, cursor, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr):
    """cursor[b]: how many of the keys [at, end) have a code below b."""
    lane = tl.arange(0, BN)
    wide = tl.arange(0, BB)
    for b in range(0, BUCKETS, BB):
        tl.store(cursor + b + wide, tl.zeros([BB], tl.int32), mask=b + wide < BUCKETS)
    tl.debug_barrier()
    for p in range(at, end, BN):
        there = p + lane < end
        code = tl.load(codes + (p + lane).to(tl.int64) * stride, mask=there, other=0).to(tl.int32)
        tl.atomic_add(cursor + code, 1, mask=there, sem="relaxed")
    tl.debug_barrier()
    before = 0
    for b in range(0, BUCKETS, BB):
        there = b + wide < BUCKETS
        n = tl.load(cursor + b + wide, mask=there, other=0, cache_modifier=".cg")  # atomics pass the first cache by
        tl.store(cursor + b + wide, tl.cumsum(n, 0) - n + before, mask=there)
        before += tl.sum(n, 0)
    tl.debug_barrier()


@triton.jit
def _make_room(place, edges, cursor, new, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr):
    """Move each bucket behind the new keys of those below it, the last ids first; cursor[b] becomes its end."""
    lane = tl.arange(0, BN)
    total = tl.load(edges + BUCKETS).to(tl.int32)
    rounds = tl.cdiv(total, BN)
    for back in range(rounds):
        at = (rounds - 1 - back) * BN + lane
        there = at < total
        bucket = _bucket_of(edges, at, there, BUCKETS, BN)
        by = tl.load(cursor + bucket, mask=there, other=0, cache_modifier=".cg")
        i = tl.load(place + at, mask=there, other=0)
        tl.debug_barrier()  # all have read what others write over
        tl.store(place + at + by, i, mask=there & (by > 0))
        tl.debug_barrier()
    wide = tl.arange(0, BB)
    for b in range(0, BUCKETS, BB):
        there = b + wide < BUCKETS
        first = tl.load(edges + b + wide, mask=there, other=0).to(tl.int32)
        last = tl.load(edges + b + wide + 1, mask=there, other=0).to(tl.int32)
        by = tl.load(cursor + b + wide, mask=there, other=0, cache_modifier=".cg")
        tl.debug_barrier()
        tl.store(edges + b + wide, (first + by).to(edges.dtype.element_ty), mask=there)
        tl.store(cursor + b + wide, last + by, mask=there)
        tl.debug_barrier()
    tl.store(edges + BUCKETS, (total + new).to(edges.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def _add_new(codes, stride, at, end, begin, place, cursor, BN: tl.constexpr):
    """Put the ids of the keys [at, end) at the ends of their buckets, in order."""
    lane = tl.arange(0, BN)
    for p in range(at, end, BN):
        there = p + lane < end
        code = tl.load(codes + (p + lane).to(tl.int64) * stride, mask=there, other=0).to(tl.int32)
        base = tl.load(cursor + code, mask=there, other=0, cache_modifier=".cg")
        same = (code[:, None] == code[None, :]) & there[None, :] & there[:, None]
        rank = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        others = tl.sum(same.to(tl.int32), 1)
        tl.debug_barrier()
        tl.store(place + base + rank, (p + lane - begin).to(tl.uint16), mask=there)
        tl.store(cursor + code, base + others, mask=there & (rank + 1 == others))
        tl.debug_barrier()


@triton.jit
def _add(
    row, its, its_stride, codes, stride, at, end, lowest, cursor, SIZE: tl.constexpr, BUCKETS: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the keys [at, end) of one segment to one table, whose ids begin at row and offsets at its."""
    begin = at // SIZE * SIZE
    edges = its + (at // SIZE).to(tl.int64) * its_stride
    place = row + begin
    held = at - tl.maximum(begin, lowest)  # keys that the segment should have
    wide = tl.arange(0, BB)
    if held > 0:
        if tl.load(edges + BUCKETS).to(tl.int32) > held:
            _forget(place, edges, at - begin, cursor, BUCKETS, BB, BN)
    else:
        for k in range(0, BUCKETS + 1, BB):
            tl.store(edges + k + wide, tl.zeros([BB], edges.dtype.element_ty), mask=k + wide <= BUCKETS)
        tl.debug_barrier()
    _count_new(codes, stride, at, end, cursor, BUCKETS, BB, BN)
    _make_room(place, edges, cursor, end - at, BUCKETS, BB, BN)
    _add_new(codes, stride, at, end, begin, place, cursor, BK)


@triton.jit
def build(
    ids, id_strides, offsets, offset_strides, codes, code_strides, seq, start, stop, cursors, heads, tables, lowest,
    SIZE: tl.constexpr, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add keys [start, stop) of an entry to one table of one KV head; nothing is touched where there are none.

    Strides: of ids (sequence, head, table); of offsets (sequence, head, table, segment); of codes (entry, key, head,
    table). cursors: int32 [programs, BUCKETS], scratch. lowest: HashTables.first.
    """
    program = tl.program_id(0)
    s, g, table = program // (heads * tables), program // tables % heads, program % tables
    b = tl.load(seq + s).to(tl.int64)
    at, last = tl.load(start + s).to(tl.int32), tl.load(stop + s).to(tl.int32)
    row = ids + b * id_strides[0] + g * id_strides[1] + table * id_strides[2]
    its = offsets + b * offset_strides[0] + g * offset_strides[1] + table * offset_strides[2]
    cursor = cursors + program.to(tl.int64) * BUCKETS
    mine = codes + s.to(tl.int64) * code_strides[0] + g * code_strides[2] + table * code_strides[3]
    mine -= at.to(tl.int64) * code_strides[1]  # by position
    while at < last:
        end = tl.minimum(at // SIZE * SIZE + SIZE, last)
        _add(row, its, offset_strides[3], mine, code_strides[1], at, end, lowest, cursor, SIZE, BUCKETS, BB, BN, BK)
        at = end


@triton.jit
def average(
    k, k_strides, table, table_row, slots, ends, stop, held, done, centre, lowest, count, D: tl.constexpr,
    D2: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The mean of keys [lowest, lowest + count) of a sequence and KV head, if its first keys enter the tables now.

    slots, stop: [B]; ends: [slots], of the tables; centre: fp32 [slots, G, D]. Keys that are not finite are left out.
    With count 0 there is no mean. held: int32 [B], becomes the sequence's end; done: int32 [B], becomes 0.
    """
    if CHAINED:
        gdc_launch_dependents()
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    end = tl.load(ends + slot)
    if g == 0:
        tl.store(held + b, end)
        tl.store(done + b, 0)
    if (count > 0) & (end <= lowest) & (tl.load(stop + b) > lowest):
        d = tl.arange(0, D2)
        total, used = tl.zeros([D2], tl.float64), tl.full((), 0, tl.int32)
        for begin in range(lowest, lowest + count, BN):
            at = begin + tl.arange(0, BN)
            there = at < lowest + count
            place = _place(k_strides, table, table_row, b, at, there, PAGED, PAGE) + g * k_strides[1]
            some = there[:, None] & (d < D)[None, :]
            v = tl.load(k + place[:, None] + d[None, :], mask=some, other=0.0).to(tl.float32)
            finite = there & (tl.sum((v - v != 0.0).to(tl.int32), 1) == 0)
            total += tl.sum(tl.where(finite[:, None], v, 0.0).to(tl.float64), 0)
            used += tl.sum(finite.to(tl.int32), 0)
        mean = (total / tl.maximum(used, 1).to(tl.float64)).to(tl.float32)
        tl.store(centre + (slot * tl.num_programs(1) + g) * D + d, mean, mask=d < D)


@triton.jit
def seal(
    ids, id_strides, offsets, offset_strides, k, k_strides, table, table_row, centre, projections, slots, ends, stop,
    held, done, cursors, codes, sequences, heads, tables, lowest, BITS: tl.constexpr, BITS2: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    BUCKETS: tl.constexpr, ROOM: tl.constexpr, BS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Hash the keys [held, stop) of a sequence for one table of one KV head, and add them, ROOM at a time.

    Programs take the tables of all sequences in turns; the one that finishes a sequence's last table moves its end.
    slots, stop, held, done: [B]; ends: [slots]. cursors: int32 [programs, BUCKETS], codes: uint16 [programs, ROOM],
    scratch. BS: at least B.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    every, grid = tl.arange(0, BS), tl.num_programs(0)
    before = tl.load(held + every, mask=every < sequences, other=0)
    after = tl.load(stop + every, mask=every < sequences, other=0).to(tl.int32)
    if tl.max((after > tl.maximum(before, lowest)).to(tl.int32), 0) > 0:
        cursor, mine = cursors + tl.program_id(0) * BUCKETS, codes + tl.program_id(0) * ROOM
        d, bit = tl.arange(0, D2), tl.arange(0, BITS2)
        for one in range(tl.program_id(0), sequences * heads * tables, grid):
            b, g, t = (one // (heads * tables)).to(tl.int64), one // tables % heads, one % tables
            slot = tl.load(slots + b).to(tl.int64)
            at, last = tl.maximum(tl.load(held + b), lowest).to(tl.int32), tl.load(stop + b).to(tl.int32)
            if at < last:
                row = ids + slot * id_strides[0] + g * id_strides[1] + t * id_strides[2]
                its = offsets + slot * offset_strides[0] + g * offset_strides[1] + t * offset_strides[2]
                w = _directions(projections, t, bit, d, BITS, D)
                c = tl.load(centre + (slot * heads + g) * D + d, mask=d < D, other=0.0)
                while at < last:
                    end = tl.minimum(tl.minimum(at // SIZE * SIZE + SIZE, last), at + ROOM)
                    for begin in range(at, end, BV):
                        p = begin + tl.arange(0, BV)
                        there = p < end
                        place = _place(k_strides, table, table_row, b, p, there, PAGED, PAGE) + g * k_strides[1]
                        some = there[:, None] & (d < D)[None, :]
                        v = tl.load(k + place[:, None] + d[None, :], mask=some, other=0.0).to(tl.float32)
                        code = _coded(tl.where(some, v - c[None, :], 0.0), w, BITS, BITS2)
                        tl.store(mine + p - at, code, mask=there)
                    tl.debug_barrier()
                    _add(row, its, offset_strides[3], mine - at, 1, at, end, lowest, cursor, SIZE, BUCKETS, BB, BN, BK)
                    at = end
                if tl.atomic_add(done + b, 1) == heads * tables - 1:
                    tl.store(ends + slot, last)


@triton.jit
def hash_keys(
    k, k_strides, table, table_row, centre, projections, slots, stop, held, codes, heads, lowest, segment, room,
    TABLES: tl.constexpr, BITS: tl.constexpr, BITS2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT tables' codes of BV keys of a sequence and KV head, if they are of [held, stop).

    codes: uint16 [B, heads, TABLES, room], of positions from segment SIZE on.
    """
    item, begin = tl.program_id(0), tl.program_id(1) * BV
    b, g = (item // heads).to(tl.int64), item % heads
    p = segment * SIZE + begin + tl.arange(0, BV)
    at, last = tl.maximum(tl.load(held + b), lowest).to(tl.int32), tl.load(stop + b).to(tl.int32)
    there = (p >= at) & (p < last) & (begin + tl.arange(0, BV) < room)
    if tl.max(there.to(tl.int32), 0) > 0:
        slot = tl.load(slots + b).to(tl.int64)
        d, bit = tl.arange(0, D2), tl.arange(0, BITS2)
        place = _place(k_strides, table, table_row, b, p, there, PAGED, PAGE) + g * k_strides[1]
        some = there[:, None] & (d < D)[None, :]
        v = tl.load(k + place[:, None] + d[None, :], mask=some, other=0.0).to(tl.float32)
        c = tl.load(centre + (slot * heads + g) * D + d, mask=d < D, other=0.0)
        v = tl.where(some, v - c[None, :], 0.0)
        first = tl.program_id(2) * BT
        for t in range(first, tl.minimum(first + BT, TABLES)):
            code = _coded(v, _directions(projections, t, bit, d, BITS, D), BITS, BITS2)
            row = codes + (item.to(tl.int64) * TABLES + t) * room + begin
            tl.store(row + tl.arange(0, BV), code, mask=there)


@triton.jit
def add_keys(
    ids, id_strides, offsets, offset_strides, slots, stop, held, codes, cursors, heads, tables, lowest, segment, room,
    SIZE: tl.constexpr, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the keys of [held, stop) that are of one segment to one table of one KV head.

    codes: as hash_keys writes them. cursors: int32 [programs, BUCKETS], scratch.
    """
    item, program = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    b, g, t = (item // (heads * tables)).to(tl.int64), item // tables % heads, item % tables
    begin = (segment + tl.program_id(1)) * SIZE
    at = tl.maximum(tl.maximum(tl.load(held + b), lowest).to(tl.int32), begin)
    end = tl.minimum(tl.load(stop + b).to(tl.int32), begin + SIZE)
    if at < end:
        slot = tl.load(slots + b).to(tl.int64)
        row = ids + slot * id_strides[0] + g * id_strides[1] + t * id_strides[2]
        its = offsets + slot * offset_strides[0] + g * offset_strides[1] + t * offset_strides[2]
        mine = codes + item.to(tl.int64) * room - segment * SIZE  # by position
        cursor = cursors + program.to(tl.int64) * BUCKETS
        _add(row, its, offset_strides[3], mine, 1, at, end, lowest, cursor, SIZE, BUCKETS, BB, BN, BK)
