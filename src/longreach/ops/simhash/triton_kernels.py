# mypy: ignore-errors
"""The Triton kernels of simhash."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def codes(
    x, x_strides, centre, centre_strides, projections, out, count, inner, middle, TABLES: tl.constexpr,
    BITS: tl.constexpr, BITS2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, CENTRED: tl.constexpr, BM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One table's codes of BM vectors. x, centre: [outer, middle, inner, D] by strides; out: [count, TABLES].

    CHAINED: this kernel may start while the one before it runs, and waits; so may the next one.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    table = tl.program_id(1)
    there = n < count
    d = tl.arange(0, D2)
    some = there[:, None] & (d < D)[None, :]
    a, b, c = (n // (inner * middle)).to(tl.int64), (n // inner % middle).to(tl.int64), (n % inner).to(tl.int64)
    place = a * x_strides[0] + b * x_strides[1] + c * x_strides[2]
    v = tl.load(x + place[:, None] + (d * x_strides[3])[None, :], mask=some, other=0.0)
    if CENTRED:
        v = v.to(tl.float32)
        place = a * centre_strides[0] + b * centre_strides[1] + c * centre_strides[2]
        at = centre + place[:, None] + (d * centre_strides[3])[None, :]
        v -= tl.load(at, mask=some, other=0.0).to(tl.float32)
    w = _directions(projections, table, tl.arange(0, BITS2), d, BITS, D)
    tl.store(out + n.to(tl.int64) * TABLES + table, _coded(v, w, BITS, BITS2), mask=there)


@triton.jit
def _directions(projections, table, bit, d, BITS: tl.constexpr, D: tl.constexpr):
    """fp32 [bits, dims]: a table's directions, of bf16 given as int16: the interpreter has no arithmetic of bf16."""
    row = projections + (table * BITS + bit)[:, None] * D + d[None, :]
    w = tl.load(row, mask=(bit < BITS)[:, None] & (d < D)[None, :], other=0)
    return (w.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _coded(v, w, BITS: tl.constexpr, BITS2: tl.constexpr):
    """uint16 [vectors]: the signs of the products of vectors [vectors, D] and directions [BITS2, D], in fp32."""
    wide = v.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    usable = (square > 0.0) & (square < float("inf"))
    bit = tl.arange(0, BITS2)
    wide = tl.where(usable[:, None], wide, 0.0)
    if INTERPRETED:
        products = tl.dot(wide, tl.trans(w), input_precision="ieee")
    else:  # fp32 is the sum of three numbers of bf16, as the directions are: exact products, by tensor cores
        directions, high = tl.trans(w.to(tl.bfloat16)), wide.to(tl.bfloat16)
        products = tl.dot(high, directions)
        if v.dtype != tl.bfloat16:
            rest = wide - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            products = tl.dot(low, directions) + tl.dot(middle, directions) + products
    signs = products > 0.0
    return tl.sum(tl.where(signs & (bit < BITS)[None, :], 1 << bit[None, :], 0), 1).to(tl.uint16)


@triton.jit
def _place(k_strides, table, table_row, b, at, there, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys of a sequence's positions lie, for KV head 0."""
    if PAGED:
        page = tl.load(table + b * table_row + at // PAGE, mask=there, other=0).to(tl.int64)
        return page * k_strides[0] + (at % PAGE).to(tl.int64) * k_strides[2]
    return b * k_strides[0] + at.to(tl.int64) * k_strides[2]


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


@triton.jit
def look_up(
    ids, id_strides, offsets, offset_strides, codes, seq, stop, times, looked_up, capacity, H, G, tables, lowest,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Count one more table for each key of a query's buckets.

    codes: uint16 [R, H, tables]. times: int32 [R, H, capacity]; looked_up: int32 [R, H // WIDTH]; both start at 0.
    """
    item, table = tl.program_id(0), tl.program_id(1)
    r, h = item // H, item % H
    b = tl.load(seq + r).to(tl.int64)
    last = tl.load(stop + b)
    if last > lowest:
        g = h // (H // G)
        code = tl.load(codes + item.to(tl.int64) * tables + table).to(tl.int32)
        row = ids + b * id_strides[0] + g * id_strides[1] + table * id_strides[2]
        its = offsets + b * offset_strides[0] + g * offset_strides[1] + table * offset_strides[2] + code
        mine = times + item.to(tl.int64) * capacity
        lane = tl.arange(0, BN)
        read = 0
        for begin in range(lowest // SIZE * SIZE, last, SIZE):
            edges = its + (begin // SIZE) * offset_strides[3]
            first, end = tl.load(edges).to(tl.int32), tl.load(edges + 1).to(tl.int32)
            read += end - first
            for j in range(first, end, BN):
                there = j + lane < end
                at = begin + tl.load(row + begin + j + lane, mask=there, other=0).to(tl.int32)
                tl.atomic_add(mine + at, 1, mask=there & (at < last), sem="relaxed")
        tl.atomic_add(looked_up + item // WIDTH, read, sem="relaxed")


@triton.jit
def gather(
    times, seq, stop, index, count, met, columns, room, lowest, lists, least, WIDTH: tl.constexpr, BN: tl.constexpr
):
    """A list: the keys that a head of it met in `least` tables, ascending, and how many heads did.

    times: [R, lists * WIDTH, columns]; index, met: [R, lists, room], of which the first `count` are written.
    """
    item = tl.program_id(0).to(tl.int64)
    last = tl.load(stop + tl.load(seq + item // lists).to(tl.int64))
    lane = tl.arange(0, BN)
    n = 0
    for begin in range(lowest, last, BN):
        at = begin + lane
        heads = tl.zeros([BN], tl.int32)
        for h in range(WIDTH):
            heads += (tl.load(times + (item * WIDTH + h) * columns + at, mask=at < last, other=0) >= least).to(tl.int32)
        hit = heads > 0
        place = n + tl.cumsum(hit.to(tl.int32), 0) - 1
        keep = hit & (place < room)
        tl.store(index + item * room + place, at, mask=keep)
        tl.store(met + item * room + place, heads.to(tl.uint8), mask=keep)
        n += tl.sum(hit.to(tl.int32), 0)
    tl.store(count + item, n)


@triton.jit
def log(x):
    """Natural log of positive normal fp32, to two units in the last place; the hardware's errs in small results."""
    whole = x.to(tl.int32, bitcast=True)
    e = (((whole >> 23) & 255) - 127).to(tl.float32)
    m = ((whole & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    large = m > 1.41421356
    e = tl.where(large, e + 1.0, e)
    f = tl.where(large, m * 0.5, m) - 1.0
    z = f * f
    y = 7.0376836292e-2 * f - 1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f - 1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f - 1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f - 2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = y * f * z + e * -2.12194440e-4 - 0.5 * z
    return f + y + e * 0.693359375  # ln 2 in two parts


@triton.jit
def _log_rest(x):
    """log(1 - x) of x in [0, 1], to the last places; the rounding of 1 - x is added. At 1 it is the log of 2^-126."""
    q = 1.0 - x
    return log(tl.maximum(q, 1.1754943508222875e-38)) + ((1.0 - q) - x)


@triton.jit
def agreement(c):
    """1 - acos(c) / pi, without the difference where it is small (Abramowitz and Stegun, 4.4.46)."""
    a = tl.minimum(tl.abs(c), 1.0)
    y = -0.0012624911 * a + 0.0066700901
    y = y * a - 0.0170881256
    y = y * a + 0.0308918810
    y = y * a - 0.0501743046
    y = y * a + 0.0889789874
    y = y * a - 0.2145988016
    y = y * a + 1.5707963050
    small = tl.sqrt(1.0 - a) * y * 0.31830989
    return tl.where(c > 0.0, 1.0 - small, small)


@triton.jit
def inclusion(p, LAW: tl.constexpr):
    """u of p, as probability.inclusion states it. LAW: as `law` makes it."""
    TABLES: tl.constexpr = LAW[0]
    LEAST: tl.constexpr = LAW[1]
    BITS: tl.constexpr = LAW[2]
    SPLIT: tl.constexpr = LAW[3]
    SCALE: tl.constexpr = LAW[4]
    COEFFICIENTS: tl.constexpr = LAW[5]
    BINOMIALS: tl.constexpr = LAW[6]
    x, square = tl.full(p.shape, 1.0, tl.float32), p
    for i in tl.static_range(5):
        if (BITS >> i) & 1:
            x *= square
        square *= square
    left = 1.0 / tl.maximum(1.0 - x, 1.1754943508222875e-38)
    small, many = tl.zeros(p.shape, tl.float32), tl.exp((TABLES - LEAST + 1) * _log_rest(x))
    for i in tl.static_range(len(COEFFICIENTS)):
        small = small * (x * left) + COEFFICIENTS[len(COEFFICIENTS) - 1 - i]
    small *= many * left
    for _ in tl.static_range(LEAST):
        small *= SCALE * x
    rest, power = tl.zeros(p.shape, tl.float32), tl.full(p.shape, 1.0, tl.float32)
    for j in tl.static_range(LEAST):
        rest = rest * (1.0 - x) + BINOMIALS[j] * power
        power *= x
    return tl.where(x < SPLIT, small, 1.0 - many * rest)


@triton.jit
def weigh(
    q, q_strides, k, k_strides, centre, seq, table, table_row, index, met, count, weight, factor, room, lists,
    floor, WIDTH: tl.constexpr, PER_KV: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, LAW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Log-weights and factors of BC entries of a list. PER_KV: lists of a KV head. centre: fp32 [B, G, D]. LAW: see
    `inclusion`.
    """
    item = tl.program_id(0)
    n = tl.load(count + item)
    first = tl.program_id(1) * BC
    if (n <= room) & (first < n):
        r, li = item // lists, item % lists
        g = (li // PER_KV).to(tl.int64)
        b = tl.load(seq + r).to(tl.int64)
        c = first + tl.arange(0, BC)
        there = c < n
        entry = item.to(tl.int64) * room + c
        slot = tl.load(index + entry, mask=there, other=0)
        place = _place(k_strides, table, table_row, b, slot, there, PAGED, PAGE)
        d = tl.arange(0, D2)
        some = d < D
        row = k + (place + g * k_strides[1])[:, None] + d[None, :]
        v = tl.load(row, mask=there[:, None] & some[None, :], other=0.0).to(tl.float32)
        heads = (lists // PER_KV).to(tl.int64)
        v -= tl.load(centre + (b * heads + g) * D + d, mask=some, other=0.0)[None, :]
        square = tl.sum(tl.where(some[None, :], v * v, 0.0), 1)
        usable = (square > 0.0) & (square < float("inf"))
        v = tl.where(usable[:, None] & some[None, :], v, 0.0)
        length = tl.sqrt(tl.where(usable, square, 1.0))
        total, spread = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
        for h in range(WIDTH):
            mine = q + r * q_strides[0] + (li * WIDTH + h) * q_strides[1]
            x = tl.load(mine + d, mask=some, other=0.0).to(tl.float32)
            own = tl.sum(x * x, 0)
            known = (own > 0.0) & (own < float("inf"))
            x = tl.where(known, x / tl.sqrt(tl.where(known, own, 1.0)), 0.0)
            cosine = tl.sum(v * x[None, :], 1) / length
            cosine = tl.where(usable, cosine, tl.where(known, 0.0, 1.0))
            u = tl.maximum(inclusion(agreement(cosine), LAW), floor)
            total += u
            spread += u * (1.0 - u)
        times = tl.load(met + entry, mask=there, other=1).to(tl.float32)
        tl.store(weight + entry, log(times) - log(total), mask=there)
        tl.store(factor + entry, spread / total, mask=there)
