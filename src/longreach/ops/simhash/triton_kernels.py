# mypy: ignore-errors
"""Triton kernels of codes, look-ups in tables, and weights."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def codes(
    x, x_strides, centre, centre_strides, projections, out, count, inner, middle, TABLES: tl.constexpr,
    BITS: tl.constexpr, BITS2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, CENTRED: tl.constexpr, BM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One table's codes of BM vectors. x, centre: [outer, middle, inner, D] by strides; out: [count, TABLES].

    CHAINED: this kernel may start while the one before it runs, and waits. The next one may not: its first programs
    would crowd on the few processors that have room.
    """
    if CHAINED:
        gdc_wait()
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
