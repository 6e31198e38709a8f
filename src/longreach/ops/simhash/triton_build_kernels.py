# mypy: ignore-errors
"""Triton kernels that put keys into tables: by codes, in blocks while decoding, and in whole segments of a prompt."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.simhash.triton_kernels import INTERPRETED, _coded, _directions, _place
from longreach.ops.simhash.triton_search_kernels import _count, _put, _word, _words


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
def _fill(place, edges, codes, stride, at, end, begin, cursor, BUCKETS: tl.constexpr, BB: tl.constexpr,
          BN: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Put the keys [at, end) into a segment that has none."""
    _count_new(codes, stride, at, end, cursor, BUCKETS, BB, BN)
    wide = tl.arange(0, BB)
    for b in range(0, BUCKETS, BB):
        there = b + wide < BUCKETS
        first = tl.load(cursor + b + wide, mask=there, other=0)
        tl.store(edges + b + wide, first.to(edges.dtype.element_ty), mask=there)
    tl.store(edges + BUCKETS, (end - at).to(edges.dtype.element_ty))
    tl.debug_barrier()
    _add_new(codes, stride, at, end, begin, place, cursor, BV)


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
def _ones(x):
    """How many bits are set."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = x.to(tl.uint32)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _insert(place, edges, codes, stride, at, end, begin, words, memory, SIZE: tl.constexpr, BUCKETS: tl.constexpr,
            BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Add the keys [at, end), BK at most, to a segment that has some; ids stay in order.

    A new key goes behind the old ones of its bucket. A bit for each position says whether a new one goes there, so the
    ids that move find where they come from by counting bits. Words of shared memory: SIZE / 32 of bits, as many for the
    bits before each, and BK for the new keys' codes, sorted.
    """
    W: tl.constexpr = (SIZE + 31) // 32
    FAR: tl.constexpr = 1 << 16  # above all codes
    new, lane, wide, w = tl.arange(0, BK), tl.arange(0, BN), tl.arange(0, BB), tl.arange(0, W)
    count, held = end - at, tl.load(edges + BUCKETS).to(tl.int32)
    code = tl.load(codes + (at + new).to(tl.int64) * stride, mask=new < count, other=0).to(tl.int32)
    order = tl.sort(tl.where(new < count, code, FAR) * BK + new)
    code, there = order // BK, new < count
    to = tl.load(edges + code + 1, mask=there, other=0).to(tl.int32) + new
    tl.debug_barrier()  # the words of the keys before were read
    _put(words, memory, w, tl.zeros([W], tl.int32))
    _put(words, memory, 2 * W + new, code)
    tl.debug_barrier()
    _count(words, memory, tl.where(there, to >> 5, 0), tl.where(there, 1 << (to & 31), 0))
    tl.debug_barrier()
    bits = _ones(_word(words, memory, w))
    _put(words, memory, W + w, tl.cumsum(bits, 0) - bits)
    tl.debug_barrier()
    least, total = tl.min(tl.where(there, to, FAR), 0), held + count
    for back in range(tl.cdiv(total - least, BN)):  # the last ones first
        o = total - (back + 1) * BN + lane
        o = tl.where(o < least, least, o)  # where a new one goes
        near = _word(words, memory, o >> 5)
        moves = ((near >> (o & 31)) & 1) == 0
        by = _word(words, memory, W + (o >> 5)) + _ones(near & ((1 << (o & 31)) - 1))
        i = tl.load(place + o - by, mask=moves, other=0)
        tl.debug_barrier()  # all have read what others write over
        tl.store(place + o, i, mask=moves)
    tl.debug_barrier()
    tl.store(place + to, (at + (order & (BK - 1)) - begin).to(tl.uint16), mask=there)
    for b in range(0, BUCKETS, BB):
        edge = 1 + b + wide
        inside = edge <= BUCKETS
        before = tl.zeros([BB], tl.int32)  # new keys with a lower code
        step = BK // 2
        while step > 0:
            before = tl.where(_word(words, memory, 2 * W + before + step - 1) < edge, before + step, before)
            step //= 2
        before += (_word(words, memory, 2 * W + before) < edge).to(tl.int32)
        old = tl.load(edges + edge, mask=inside, other=0).to(tl.int32)
        tl.store(edges + edge, (old + before).to(edges.dtype.element_ty), mask=inside)
    tl.debug_barrier()


@triton.jit
def _add(
    row, its, its_stride, codes, stride, at, end, lowest, cursor, words, memory, SIZE: tl.constexpr,
    BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the keys [at, end) of one segment to one table, whose ids begin at row and offsets at its."""
    begin = at // SIZE * SIZE
    edges = its + (at // SIZE).to(tl.int64) * its_stride
    place = row + begin
    held = at - tl.maximum(begin, lowest)  # keys that the segment should have
    if held > 0:
        if tl.load(edges + BUCKETS).to(tl.int32) > held:
            _forget(place, edges, at - begin, cursor, BUCKETS, BB, BN)
        for p in range(at, end, BK):
            _insert(place, edges, codes, stride, p, tl.minimum(p + BK, end), begin, words, memory, SIZE, BUCKETS, BB,
                    BN, BK)  # fmt: skip
    else:
        _fill(place, edges, codes, stride, at, end, begin, cursor, BUCKETS, BB, BN, BV)


@triton.jit
def _own(program, memory, SIZE: tl.constexpr, BK: tl.constexpr):
    """(address of `_insert`'s shared memory, this program's part of `memory`, which only the interpreter uses)."""
    WORDS: tl.constexpr = (SIZE + 31) // 32 * 2 + BK
    return _words(program - program, WORDS), memory + program.to(tl.int64) * WORDS


@triton.jit
def build(
    ids, id_strides, offsets, offset_strides, codes, code_strides, seq, start, stop, cursors, memory, heads, tables,
    lowest, SIZE: tl.constexpr, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Add keys [start, stop) of an entry to one table of one KV head; nothing is touched where there are none.

    Strides: of ids (sequence, head, table); of offsets (sequence, head, table, segment); of codes (entry, key, head,
    table). cursors: int32 [programs, BUCKETS], scratch. memory: int32 [programs, 2 ceil(SIZE / 32) + BK], for the
    interpreter, which has no shared memory. lowest: HashTables.first.
    """
    program = tl.program_id(0)
    words, own = _own(program, memory, SIZE, BK)
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
        _add(row, its, offset_strides[3], mine, code_strides[1], at, end, lowest, cursor, words, own, SIZE, BUCKETS, BB,
             BN, BV, BK)  # fmt: skip
        at = end


@triton.jit
def _mean(k, k_strides, table, table_row, b, g, lowest, count, D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr,
          PAGE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """fp32 [D2]: the mean of keys [lowest, lowest + count), those left out that are not finite."""
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
    return (total / tl.maximum(used, 1).to(tl.float64)).to(tl.float32)


@triton.jit
def average(
    k, k_strides, table, table_row, slots, ends, stop, held, centre, lowest, count, D: tl.constexpr, D2: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The mean of keys [lowest, lowest + count) of a sequence and KV head, if its first keys enter the tables now.

    slots, stop: [B]; ends: [slots], of the tables; centre: fp32 [slots, G, D]. With count 0 there is no mean. held:
    int32 [B], becomes the sequence's end.
    """
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    end = tl.load(ends + slot)
    if g == 0:
        tl.store(held + b, end)
    if (count > 0) & (end <= lowest) & (tl.load(stop + b) > lowest):
        d = tl.arange(0, D2)
        mean = _mean(k, k_strides, table, table_row, b, g, lowest, count, D, D2, PAGED, PAGE, BN)
        tl.store(centre + (slot * tl.num_programs(1) + g) * D + d, mean, mask=d < D)


@triton.jit
def hash_keys(
    k, k_strides, table, table_row, centre, norms, norm_strides, projections, slots, ends, stop, held, done, codes,
    heads, lowest, count, segment, room, TABLES: tl.constexpr, BITS: tl.constexpr, BITS2: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """BT tables' codes of BV keys of a sequence and KV head, if they enter the tables now; and their inverse norms.

    codes: uint16 [B, heads, TABLES, room], of positions from the sequence's end on (BLOCK), or from segment SIZE on.
    BLOCK: each program finds the mean that `average` does, so that no launch is needed for it; held becomes the
    sequence's end and done 0.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    item, tile = tl.program_id(0), tl.program_id(1) * BV + tl.arange(0, BV)
    b, g = (item // heads).to(tl.int64), item % heads
    slot, last = tl.load(slots + b).to(tl.int64), tl.load(stop + b).to(tl.int32)
    first = (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    if BLOCK:
        end = tl.load(ends + slot).to(tl.int32)
        if first & (g == 0):
            tl.store(held + b, end)
            tl.store(done + b, 0)
        at = tl.maximum(end, lowest)
        p = at + tile
    else:
        end = lowest
        at = tl.maximum(tl.load(held + b).to(tl.int32), lowest)
        p = segment * SIZE + tile
    there = (p >= at) & (p < last) & (tile < room)
    if tl.max(there.to(tl.int32), 0) > 0:
        d, bit = tl.arange(0, D2), tl.arange(0, BITS2)
        mean = centre + (slot * heads + g) * D + d
        if BLOCK:
            if (count > 0) & (end <= lowest):
                c = _mean(k, k_strides, table, table_row, b, g, lowest, count, D, D2, PAGED, PAGE, BN)
                if first:
                    tl.store(mean, c, mask=d < D)
            else:
                c = tl.load(mean, mask=d < D, other=0.0)
        else:
            c = tl.load(mean, mask=d < D, other=0.0)
        place = _place(k_strides, table, table_row, b, p, there, PAGED, PAGE) + g * k_strides[1]
        some = there[:, None] & (d < D)[None, :]
        v = tl.load(k + place[:, None] + d[None, :], mask=some, other=0.0).to(tl.float32)
        v = tl.where(some, v - c[None, :], 0.0)
        begin = tl.program_id(2) * BT
        if NORMS and begin == 0:
            square = tl.sum(v * v, 1)
            usable = (square > 0.0) & (square < float("inf"))
            inverse = tl.where(usable, tl.rsqrt(tl.where(usable, square, 1.0)), 0.0)
            tl.store(norms + slot * norm_strides[0] + g * norm_strides[1] + p, inverse, mask=there)
        for t in range(begin, tl.minimum(begin + BT, TABLES)):
            code = _coded(v, _directions(projections, t, bit, d, BITS, D), BITS, BITS2)
            tl.store(codes + (item.to(tl.int64) * TABLES + t) * room + tile, code, mask=there)


@triton.jit
def seal(
    ids, id_strides, offsets, offset_strides, slots, ends, stop, held, done, cursors, codes, memory, sequences, heads,
    tables, lowest, room, SIZE: tl.constexpr, BUCKETS: tl.constexpr, BS: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Add the keys [held, stop) of a sequence, `room` at most, to one table of one KV head.

    Programs take the tables of all sequences in turns; the one that finishes a sequence's last table moves its end.
    slots, stop, held, done: [B]; ends: [slots]. cursors: int32 [programs, BUCKETS], scratch. codes, memory: as
    hash_keys writes them, as `build` takes it. BS: at least B.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    every, program, grid = tl.arange(0, BS), tl.program_id(0), tl.num_programs(0)
    before = tl.load(held + every, mask=every < sequences, other=0)
    after = tl.load(stop + every, mask=every < sequences, other=0).to(tl.int32)
    if tl.max((after > tl.maximum(before, lowest)).to(tl.int32), 0) > 0:
        words, own = _own(program, memory, SIZE, BK)
        cursor = cursors + program.to(tl.int64) * BUCKETS
        for one in range(program, sequences * heads * tables, grid):
            b, g, t = (one // (heads * tables)).to(tl.int64), one // tables % heads, one % tables
            slot = tl.load(slots + b).to(tl.int64)
            at, last = tl.maximum(tl.load(held + b), lowest).to(tl.int32), tl.load(stop + b).to(tl.int32)
            if at < last:
                last = tl.minimum(last, at + room)
                row = ids + slot * id_strides[0] + g * id_strides[1] + t * id_strides[2]
                its = offsets + slot * offset_strides[0] + g * offset_strides[1] + t * offset_strides[2]
                mine = codes + (b * heads * tables + one % (heads * tables)) * room - at  # by position
                while at < last:
                    end = tl.minimum(at // SIZE * SIZE + SIZE, last)
                    _add(row, its, offset_strides[3], mine, 1, at, end, lowest, cursor, words, own, SIZE, BUCKETS, BB,
                         BN, BV, BK)  # fmt: skip
                    at = end
                if tl.atomic_add(done + b, 1) == heads * tables - 1:
                    tl.store(ends + slot, last)


@triton.jit
def add_keys(
    ids, id_strides, offsets, offset_strides, slots, stop, held, codes, cursors, memory, heads, tables, lowest, segment,
    room, SIZE: tl.constexpr, BUCKETS: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Add the keys of [held, stop) that are of one segment to one table of one KV head.

    codes: as hash_keys writes them. cursors: int32 [programs, BUCKETS], scratch. memory: as `build` takes it.
    """
    item, program = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    words, own = _own(program, memory, SIZE, BK)
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
        _add(row, its, offset_strides[3], mine, 1, at, end, lowest, cursor, words, own, SIZE, BUCKETS, BB, BN, BV, BK)
