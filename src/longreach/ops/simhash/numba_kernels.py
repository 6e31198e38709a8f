# mypy: ignore-errors
"""The Numba kernels of simhash."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.numba_dots import dots
from longreach.ops.numba_math import INLINE, KERNEL, bits_of, exp, float_of, prefetch, take, to_float

CHUNK = 256  # keys that are weighed at a time
PIECES = 4  # for each thread, of the lists together
AHEAD = 12  # keys that are prefetched before they are read
TABLES_AHEAD = 6  # tables whose buckets are prefetched before they are read; offsets twice as far
COUNTED = 224  # tables after which counts are cut to `least`: bytes hold the next ones too
LINE = 64  # bytes


@njit(**KERNEL)
def pack(worker, workers, signs, void, bits, codes):
    """codes [n, tables]: bit b of table l is set where signs [n, tables * bits] is positive; 0 for void vectors."""
    for i in range(worker, codes.shape[0], workers):
        row, out = signs[i], codes[i]
        for table in range(out.shape[0]):
            some = row[table * bits : (table + 1) * bits]
            code = 0
            for b in range(some.shape[0]):
                code |= (1 if some[b] > 0 else 0) << b
            out[table] = np.uint16(0 if void[i] else code)


@njit(**KERNEL)
def encode(worker, workers, x, directions, strides, bits, codes):
    """codes [n, tables] as in `pack`, of few vectors: every `workers`-th table.

    x: flat, n vectors of D numbers. directions: flat, their strides of (table, bit).
    """
    n, tables = codes.shape
    dim = x.shape[0] // n
    size = LINE // directions.itemsize
    lines = (dim + size - 1) // size
    vectors, void = np.empty((n, dim), np.float32), np.empty(n, np.bool_)
    for i in range(n):
        void[i] = widen(x[i * dim : (i + 1) * dim], vectors[i])
    places, s = np.empty(bits, np.int64), np.empty((n, bits), np.float32)
    for table in range(worker, tables, workers):
        for b in range(bits):
            places[b] = table * strides[0] + b * strides[1]
        if table + workers < tables:  # the next table's come while these are multiplied
            for b in range(bits):
                for line in range(lines):
                    prefetch(directions, (table + workers) * strides[0] + b * strides[1] + line * size)
        dots(directions, places, bits, vectors, s, dim, size, lines)
        for i in range(n):
            code = 0
            for b in range(bits):
                code |= (1 if s[i, b] > 0 else 0) << b
            codes[i, table] = np.uint16(0 if void[i] else code)


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def widen(x, out):
    """out = x in float32; whether it is void: its squared norm is zero or not finite."""
    square = np.float32(0.0)
    for d in range(out.shape[0]):
        out[d] = to_float(x[d])
        square += out[d] * out[d]
    return not np.float32(0.0) < square < np.float32(np.inf)


@njit(**INLINE)
def _sort(ids, offsets, code, begin, at, lost, kept, old, cursor):
    """Add keys from `at` on with `code` to a segment's ids and offsets. Entries with ids below `kept` stay.

    lost: whether there are others, past a truncation.
    """
    buckets = cursor.shape[0]
    if kept == 0:
        for b in range(buckets + 1):
            offsets[b] = 0
    for j in range(offsets[buckets]):
        old[j] = ids[j]
    for b in range(buckets):
        cursor[b] = np.int64(offsets[b + 1]) - np.int64(offsets[b])
    if lost:
        for b in range(buckets):
            for i in old[offsets[b] : offsets[b + 1]]:
                cursor[b] -= 1 if i >= kept else 0
    for i in range(code.shape[0]):
        cursor[code[i]] += 1
    total, first = np.int64(0), np.int64(0)  # first: of the bucket's old entries, whose offset is overwritten here
    for b in range(buckets):
        last, here = np.int64(offsets[b + 1]), cursor[b]
        offsets[b] = total
        cursor[b] = total
        if lost:
            for i in old[first:last]:
                if i < kept:
                    ids[cursor[b]] = i
                    cursor[b] += 1
        else:
            moved, there = old[first:last], ids[total : total + last - first]
            for j in range(moved.shape[0]):
                there[j] = moved[j]
            cursor[b] += last - first
        first = last
        total += here
    offsets[buckets] = total
    ahead = at - begin
    for i in range(code.shape[0]):
        place = cursor[code[i]]
        ids[place] = ahead + i
        cursor[code[i]] = place + np.uint64(1)


@njit(**KERNEL)
def build(worker, workers, ids, id_strides, offsets, offset_strides, geometry, codes, seq, start, stop, lowest):
    """Add keys [start, stop) of each entry to the tables: every `workers`-th run of tables, one after another.

    ids, offsets: flat, with strides of (sequence, head, table) and of (sequence, head, table, segment). geometry: size
    of a segment, buckets. codes: uint16 [S, G, tables, T]. seq, start, stop: int64 [S]. lowest: HashTables.first.
    """
    size, buckets = geometry
    entries, heads, tables = codes.shape[:3]
    old, cursor = np.empty(size, np.uint16), np.empty(buckets, np.uint64)
    for item in range(worker, entries * heads * tables, workers):
        s, g, table = item // (heads * tables), item // tables % heads, item % tables
        place = seq[s] * id_strides[0] + g * id_strides[1] + table * id_strides[2]
        where = seq[s] * offset_strides[0] + g * offset_strides[1] + table * offset_strides[2]
        at = start[s]
        while at < stop[s]:
            segment = at // size
            begin, end = segment * size, min((segment + 1) * size, stop[s])
            kept = at - begin if max(begin, lowest) < at else 0  # nothing is there before the first key
            its = where + segment * offset_strides[3]
            edges = offsets[its : its + buckets + 1]
            lost = kept > 0 and np.int64(edges[buckets]) > at - max(begin, lowest)
            _sort(
                ids[place + begin : place + begin + size], edges, codes[s, g, table, at - start[s] : end - start[s]],
                begin, at, lost, kept, old, cursor,
            )  # fmt: skip
            at = end


@njit(**INLINE)
def count_tables(ids, id_stride, offsets, offset_stride, codes, least, times, hits):
    """Count the tables that hold each key of a segment, and a hit for keys that reach `least`. Returns the ids read."""
    tables = codes.shape[0]
    looked_up = 0
    for table in range(tables):
        if table + 2 * TABLES_AHEAD < tables:
            prefetch(offsets, (table + 2 * TABLES_AHEAD) * offset_stride + np.int64(codes[table + 2 * TABLES_AHEAD]))
        if table + TABLES_AHEAD < tables:
            begin = np.int64(offsets[(table + TABLES_AHEAD) * offset_stride + np.int64(codes[table + TABLES_AHEAD])])
            for line in range(4):
                prefetch(ids, (table + TABLES_AHEAD) * id_stride + begin + line * (LINE // 2))
        where = table * offset_stride + np.int64(codes[table])
        begin, end = np.int64(offsets[where]), np.int64(offsets[where + 1])
        bucket = ids[table * id_stride + begin : table * id_stride + end]
        looked_up += bucket.shape[0]
        for j in range(bucket.shape[0]):
            i = bucket[j]
            n = times[i]
            times[i] = n + np.uint8(1)
            hits[i] += np.uint8(1 if n + 1 == least else 0)
        if table % COUNTED == COUNTED - 1:
            for i in range(times.shape[0]):
                times[i] = min(times[i], np.uint8(least))
    return looked_up


@njit(**INLINE)
def list_hits(hits, words, stop, begin, index, met, n):
    """Append the keys of a segment that were hit to index and met; n, how many were there, grows past their room."""
    room = index.shape[0]
    for w in range(words.shape[0]):
        if words[w] == 0:
            continue
        for i in range(8 * w, min(8 * w + 8, stop)):
            if hits[i] != 0:
                if n < room:
                    index[n] = begin + i
                    met[n] = hits[i]
                n += 1
        words[w] = 0
    return n


@njit(**KERNEL)
def collide(
    worker, workers, counter, ids, id_strides, offsets, offset_strides, geometry, codes, seq, stop, shape, least,
    results,
):  # fmt: skip
    """The keys of each row and head that collide, in pieces taken from the counter.

    A piece is a list, or if results have as many parts as there are segments, one segment of a list.
    ids, offsets, geometry: as in `build`. codes: uint16 [R, H, tables]. seq, stop: int64 [R]. shape: KV heads, query
    heads of each, segments, HashTables.first. results, written: index int32, met uint8 [R, lists, parts, room], used
    and looked_up int32 [R, lists, parts].
    """
    size = geometry[0]
    heads, group, segments, lowest = shape
    index, met, used, looked_up = results
    rows, lists, parts = index.shape[:3]
    width = heads * group // lists  # query heads of a list
    times, hits = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    words = hits.view(np.uint64)
    item = take(counter)
    while item < rows * lists * parts:
        r, li, part = item // (lists * parts), item // parts % lists, item % parts
        g = li * width // group
        n, read = 0, 0
        for segment in range(part if parts > 1 else 0, part + 1 if parts > 1 else segments):
            begin = segment * size
            if begin + size <= lowest or stop[r] <= max(begin, lowest):
                continue
            place = seq[r] * id_strides[0] + g * id_strides[1] + begin
            where = seq[r] * offset_strides[0] + g * offset_strides[1] + segment * offset_strides[3]
            for h in range(li * width, (li + 1) * width):
                read += count_tables(
                    ids[place:], id_strides[2], offsets[where:], offset_strides[2], codes[r, h], least, times, hits
                )  # fmt: skip
                for i in range(size):
                    times[i] = 0
            n = list_hits(hits, words, min(stop[r] - begin, size), begin, index[r, li, part], met[r, li, part], n)
        used[r, li, part] = n
        looked_up[r, li, part] = read
        item = take(counter)


@njit(**KERNEL)
def join(index, met, used, joined, times):
    """Behind one another what the parts of each list hold, as far as there is room."""
    rows, lists, parts = used.shape
    for r in range(rows):
        for li in range(lists):
            n = 0
            for part in range(parts):
                for i in range(min(used[r, li, part], joined.shape[2] - n)):
                    joined[r, li, n + i] = index[r, li, part, i]
                    times[r, li, n + i] = met[r, li, part, i]
                n += min(used[r, li, part], joined.shape[2] - n)


@njit(**INLINE, fastmath={"contract"})
def log(x):
    """Natural log of a positive normal float32, to two units in the last place."""
    whole = bits_of(x)
    e = np.float32(((whole >> np.int32(23)) & np.int32(255)) - np.int32(127))
    m = float_of((whole & np.int32(0x007FFFFF)) | np.int32(0x3F800000))
    large = m > np.float32(1.41421356)
    e = e + np.float32(1.0) if large else e
    f = (m * np.float32(0.5) if large else m) - np.float32(1.0)
    z = f * f
    y = np.float32(7.0376836292e-2)
    y = y * f - np.float32(1.1514610310e-1)
    y = y * f + np.float32(1.1676998740e-1)
    y = y * f - np.float32(1.2420140846e-1)
    y = y * f + np.float32(1.4249322787e-1)
    y = y * f - np.float32(1.6668057665e-1)
    y = y * f + np.float32(2.0000714765e-1)
    y = y * f - np.float32(2.4999993993e-1)
    y = y * f + np.float32(3.3333331174e-1)
    y = y * f * z + e * np.float32(-2.12194440e-4) - np.float32(0.5) * z
    return f + y + e * np.float32(0.693359375)  # ln 2 in two parts


@njit(**INLINE, fastmath={"contract"})
def _log_rest(x):
    """log(1 - x) of x in [0, 1], to the last places; the rounding of 1 - x is added. At 1 it is the log of TINY."""
    q = np.float32(1.0) - x
    return log(max(q, np.float32(2.0**-126))) + ((np.float32(1.0) - q) - x)


@njit(**INLINE, fastmath={"contract"})
def agreement(c):
    """1 - acos(c) / pi, without the difference where it is small (Abramowitz and Stegun, 4.4.46)."""
    a = min(abs(c), np.float32(1.0))
    y = np.float32(-0.0012624911)
    y = y * a + np.float32(0.0066700901)
    y = y * a - np.float32(0.0170881256)
    y = y * a + np.float32(0.0308918810)
    y = y * a - np.float32(0.0501743046)
    y = y * a + np.float32(0.0889789874)
    y = y * a - np.float32(0.2145988016)
    y = y * a + np.float32(1.5707963050)
    small = np.float32(math.sqrt(np.float32(1.0) - a)) * y * np.float32(0.31830989)
    return np.float32(1.0) - small if c > np.float32(0.0) else small


@njit(**INLINE, fastmath={"contract"})
def add_inclusion(p, n, law, x, y, z, total, spread):
    """total[c] += u and spread[c] += u (1 - u), for c below n. u: as probability.inclusion states it for p[c], at least
    floor. x, y, z are scratch.

    Written as loops over the keys without branches, which are vectorised.
    """
    bits, tables, least, split, scale, coefficients, binomials, floor = law
    for c in range(n):
        x[c] = np.float32(1.0)
    while bits:  # p: its powers of 2
        if bits & 1:
            for c in range(n):
                x[c] *= p[c]
        bits >>= 1
        if bits:
            for c in range(n):
                p[c] *= p[c]
    for c in range(n):
        z[c] = x[c] / max(np.float32(1.0) - x[c], np.float32(2.0**-126))
        y[c] = np.float32(0.0)
    for i in range(coefficients.shape[0] - 1, -1, -1):
        coefficient = coefficients[i]
        for c in range(n):
            y[c] = y[c] * z[c] + coefficient
    for _ in range(least):
        for c in range(n):
            y[c] *= scale * x[c]
    for c in range(n):
        y[c] += y[c] * z[c]  # over 1 - x: 1 / (1 - x) is 1 + r
    many = np.float32(tables - least + 1)
    for c in range(n):  # z: the sum below `least`
        z[c] = np.float32(0.0)
        p[c] = np.float32(1.0)
    for j in range(least):
        binomial = binomials[j]
        for c in range(n):
            z[c] = z[c] * (np.float32(1.0) - x[c]) + binomial * p[c]
            p[c] *= x[c]
    for c in range(n):
        power = exp(many * _log_rest(x[c]))
        u = max(y[c] * power if x[c] < split else np.float32(1.0) - power * z[c], floor)
        total[c] += u
        spread[c] += u * (np.float32(1.0) - u)


@njit(**KERNEL)
def total_inclusion(p, law, total):
    """`add_inclusion` as Python calls it; p is overwritten."""
    x, y, z = np.empty(len(p), np.float32), np.empty(len(p), np.float32), np.empty(len(p), np.float32)
    add_inclusion(p, len(p), law, x, y, z, total, np.zeros(len(p), np.float32))


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def _cosines(k, places, n, centre, q, size, lines, squares, s):
    """s[h, c] = q[h] . (k at places[c] - centre), and squares[c] of that key; four heads at a time."""
    width, dim = q.shape
    for c in range(n):
        if c + AHEAD < n:
            for line in range(lines):
                prefetch(k, places[c + AHEAD] + line * size)
        row = k[places[c] : places[c] + dim]
        h = 0
        while h + 4 <= width:
            a0 = a1 = a2 = a3 = square = np.float32(0.0)
            q0, q1, q2, q3 = q[h], q[h + 1], q[h + 2], q[h + 3]
            for d in range(dim):
                x = to_float(row[d]) - centre[d]
                square += x * x
                a0 += x * q0[d]
                a1 += x * q1[d]
                a2 += x * q2[d]
                a3 += x * q3[d]
            s[h, c], s[h + 1, c], s[h + 2, c], s[h + 3, c] = a0, a1, a2, a3
            squares[c] = square
            h += 4
        while h < width:
            a = square = np.float32(0.0)
            one = q[h]
            for d in range(dim):
                x = to_float(row[d]) - centre[d]
                square += x * x
                a += x * one[d]
            s[h, c], squares[c] = a, square
            h += 1


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def normalise(q, void):
    """To norm 1, or to zeros where void."""
    square = np.float32(0.0)
    for d in range(q.shape[0]):
        square += q[d] * q[d]
    for d in range(q.shape[0]):
        q[d] = np.float32(0.0) if void else q[d] / np.float32(math.sqrt(square))


@njit(**KERNEL)
def weigh(worker, workers, counter, q, memory, seq, filled, shape, found, law, weight, factor, wrong):
    """The log-weight and factor of every sampled key, in pieces of lists taken from the counter.

    q: flat [R * lists, width, D]. memory: k flat, its strides of (page, head, slot); table [B, pages], paged, page;
    centre float32 [B, G, D]. seq: int64 [R]; filled: int64 [B], slots in use. shape: lists a row, lists a KV head,
    query heads of a list. found: index, met [R, lists, C], count [R, lists].
    law: see `add_inclusion`. weight, factor, written: float32 [R, lists, C]; wrong, written: int64 [workers], a row
    that names a slot not in use, else -1.
    """
    k, strides, table, paged, page, centres = memory
    index, met, count = found
    lists, mine, width = shape
    units, dim = count.shape[0] * lists, centres.shape[2]
    size = LINE // k.itemsize
    lines = (dim + size - 1) // size
    places = np.empty(CHUNK, np.int64)
    s, total, squares = np.empty((width, CHUNK), np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    x, y, z = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    spread, unit_q, void = np.empty(CHUNK, np.float32), np.empty((width, dim), np.float32), np.empty(width, np.bool_)
    parts = (PIECES * workers + units - 1) // max(units, 1) if workers > 1 else 1
    item = take(counter)
    while item < units * parts:
        unit, part = item // parts, item % parts
        item = take(counter)
        row, li = unit // lists, unit % lists
        head, b = li // mine, seq[row]
        entries, times, out, off = index[row, li], met[row, li], weight[row, li], factor[row, li]
        n = np.int64(count[row, li])
        if n > entries.shape[0]:
            continue
        for h in range(width):
            void[h] = widen(q[(unit * width + h) * dim : (unit * width + h + 1) * dim], unit_q[h])
            normalise(unit_q[h], void[h])
        last = n * (part + 1) // parts
        for first in range(n * part // parts, last, CHUNK):
            some = min(CHUNK, last - first)
            for c in range(some):
                slot, place = np.int64(entries[first + c]), b
                if not 0 <= slot < filled[b]:
                    wrong[worker] = row
                    slot = 0
                if paged:
                    place, slot = table[b, slot // page], slot % page
                places[c] = place * strides[0] + head * strides[1] + slot * strides[2]
                if c < AHEAD:
                    for line in range(lines):
                        prefetch(k, places[c] + line * size)
                total[c] = spread[c] = np.float32(0.0)
            _cosines(k, places, some, centres[b, head], unit_q, size, lines, squares, s)
            for h in range(width):
                p, nothing = s[h], void[h]
                for c in range(some):
                    square = squares[c]
                    usable = square > np.float32(0.0) and square < np.float32(np.inf)
                    cosine = p[c] / np.float32(math.sqrt(square)) if usable else np.float32(1.0 if nothing else 0.0)
                    p[c] = agreement(cosine)
                add_inclusion(p, some, law, x, y, z, total, spread)
            for c in range(some):
                out[first + c] = log(np.float32(times[first + c])) - log(total[c])
                off[first + c] = spread[c] / total[c]
