# mypy: ignore-errors
"""The Triton kernels of sample: probabilities as whole numbers, so that all programs of a row agree on every column.

Each column that may be drawn has a weight w, its probability p times a power of 2, rounded to an int64 of at least 1.
Sums of weights are exact in any order. With C the columns that are certain, W the sum of the other weights and `left`
the rest of the count, a column's inclusion probability is exactly w left / W. It is drawn where
floor((S left + offset W) / W) grows, S being the sum of weights up to it. The power of 2 is such that no product
exceeds 63 bits.

C is {w >= threshold} for the largest threshold with w left < W below it. The expected size of the sample,
sum min(1, c w), is concave in c: tangents (Newton's method) bound the threshold from above, secants from below. A pass
over the columns tries T thresholds between these bounds. It has found C when no column lies between the two nearest
thresholds on both sides, and three passes are enough but for unusual scores; then `write` goes on looking.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
ENDLESS = tl.constexpr(1 << 62)  # above all weights


@triton.jit
def _row_of(row, given):
    """(scores, length, k, begin, end, wanted): of columns [begin, end) `wanted` are drawn, all others are certain.

    k: columns of the list, 0 where they exceed its capacity.
    given: scores, their list and head stride, counts, lengths, their stride, heads, columns, how many first and last
    columns are certain, capacity.
    """
    x, x_list, x_head, count, lengths, length_stride, heads, columns, front, back, capacity = given
    of_list = (row // heads).to(tl.int64)
    of_head = (row % heads).to(tl.int64)
    length = tl.load(lengths + of_list * length_stride)
    length = tl.minimum(tl.maximum(length, 0), columns).to(tl.int32)
    used = tl.minimum(tl.maximum(tl.load(count + row), 0), length).to(tl.int32)
    k = tl.where(used <= capacity, used, 0)
    recent = tl.minimum(k, back)
    early = tl.minimum(k - recent, front)
    end = length - recent
    begin = tl.minimum(early, end)
    return x + of_list * x_list + of_head * x_head, length, used, k, begin, end, k - recent - begin


@triton.jit
def _score(raw, POWER: tl.constexpr):
    """fp64: scores as they were loaded, to the power; 0 for negative ones, NaN and infinities."""
    v = raw.to(tl.float64)
    good = (v > 0.0) & (v < float("inf"))
    v = tl.where(good, v, 0.0)
    if POWER == 0.5:
        v = tl.sqrt(v)
    elif POWER != 1.0:
        power = tl.full((), POWER, tl.float64)
        v = tl.where(good, tl.exp2(power * tl.log2(tl.where(good, v, 1.0))), 0.0)
    return v


@triton.jit
def _sum(x, lo, hi, POWER: tl.constexpr, BN: tl.constexpr):
    """fp64: the sum of the scores of columns [lo, hi)."""
    n = tl.arange(0, BN)
    found = tl.zeros([BN], tl.float64)
    for at in range(lo, hi, BN):
        found += _score(tl.load(x + at + n, mask=at + n < hi, other=0.0), POWER)
    return tl.sum(found, 0)


@triton.jit
def _line(whole, wanted, size, UNIFORM: tl.constexpr):
    """fp64 (slope, least, scale): a weight is slope * score + least, the sum of all is about `scale`.

    scale is the power of 2 for which (sum + size) (wanted + 1) < 2^63, for up to 2^24 columns.
    """
    e = (tl.maximum(wanted, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    scale = (tl.full((), 1, tl.int64) << (61 - e).to(tl.int64)).to(tl.float64)
    uniform = tl.full((), UNIFORM, tl.float64)
    scored = whole > 1e-280  # below, its inverse overflows
    slope = tl.where(scored, (1.0 - uniform) * scale / tl.where(scored, whole, 1.0), 0.0)
    least = tl.where(scored, uniform * scale, scale) / tl.maximum(size, 1).to(tl.float64)
    return slope, least, scale


@triton.jit
def _weight(raw, there, slope, least, POWER: tl.constexpr):
    """int64: weights of scores as they were loaded, 0 for columns that are not `there`."""
    w = (_score(raw, POWER) * slope + least + 0.5).to(tl.int64)
    return tl.where(there, tl.maximum(w, 1), 0)


@triton.jit
def _count(x, lo, hi, theta, slope, least, POWER: tl.constexpr, T: tl.constexpr, BC: tl.constexpr):
    """int64 [T]: how many weights of columns [lo, hi) reach each threshold, and the sum of those that do not."""
    n = tl.arange(0, BC)
    reach, rest = tl.zeros([BC, T], tl.int32), tl.zeros([BC, T], tl.int64)
    raw = tl.load(x + lo + n, mask=lo + n < hi, other=0.0)
    for at in range(lo, hi, BC):
        following = tl.load(x + at + BC + n, mask=at + BC + n < hi, other=0.0)  # while these are counted
        w = _weight(raw, at + n < hi, slope, least, POWER)[:, None]
        over = w >= theta[None, :]
        reach += over.to(tl.int32)
        rest += tl.where(over, 0, w)
        raw = following
    return tl.sum(reach, 0).to(tl.int64), tl.sum(rest, 0)


@triton.jit
def _first(least, scale, wanted, size, T: tl.constexpr):
    """Thresholds of the first pass [T], and what is known of one that all weights reach: itself, their number, 0.

    The first is endless, for the sum of all weights. The others divide, evenly in the exponent, what lies between the
    largest threshold there can be and the least weight.
    """
    i = tl.arange(0, T)
    floor = tl.maximum(least.to(tl.int64), 1)
    high = tl.log2((scale / wanted.to(tl.float64)).to(tl.float32))
    low = tl.log2(floor.to(tl.float32))
    theta = tl.exp2(high + (low - high) * ((i - 1).to(tl.float32) / (T - 1))).to(tl.int64)
    return tl.where(i == 0, ENDLESS, tl.maximum(theta, floor)), floor, size.to(tl.int64), tl.full((), 0, tl.int64)


@triton.jit
def _judge(theta, reach, rest, wanted, low, low_reach, low_rest):
    """After a pass: the least threshold tried that is not too low, the largest that is, and a bound.

    theta, reach, rest: int64 [T], as in `_count`; one of them is not too low. low, low_reach, low_rest: the largest one
    that was too low before. Returns (high, high_reach, high_rest, low, low_reach, low_rest, bound, searching): `bound`
    is a threshold that is not too low; not searching: the certain columns are those that reach `high`.
    """
    left = wanted - reach
    tangent = tl.where(left > 0, (rest + left - 1) // tl.maximum(left, 1), ENDLESS)
    good = tangent <= theta
    high = tl.min(tl.where(good, theta, ENDLESS), 0)
    mine = good & (theta == high)
    high_reach = tl.max(tl.where(mine, reach, 0), 0)
    high_rest = tl.max(tl.where(mine, rest, 0), 0)
    fixed = tl.max(tl.where(mine, tangent, 0), 0) == high
    under = tl.max(tl.where(good, 0, theta), 0)
    mine = (theta == under) & ~good
    closer = under > low
    low_reach = tl.where(closer, tl.max(tl.where(mine, reach, 0), 0), low_reach)
    low_rest = tl.where(closer, tl.max(tl.where(mine, rest, 0), 0), low_rest)
    low = tl.where(closer, under, low)
    searching = (high_reach != low_reach) & ~fixed
    return high, high_reach, high_rest, low, low_reach, low_rest, tl.min(tangent, 0), searching


@triton.jit
def _next(high, high_reach, high_rest, low, low_reach, low_rest, bound, wanted, T: tl.constexpr):
    """Thresholds [T] of the next pass: from the bound above, which is not too low, down to the secant's."""
    i = tl.arange(0, T)
    a, b = 1.0 / high.to(tl.float64), 1.0 / low.to(tl.float64)
    size_a = high_reach.to(tl.float64) + high_rest.to(tl.float64) * a
    size_b = low_reach.to(tl.float64) + low_rest.to(tl.float64) * b
    share = (wanted.to(tl.float64) - size_a) / tl.maximum(size_b - size_a, 1e-300)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    least = (1.0 / (a + share * (b - a))).to(tl.int64)
    least = tl.minimum(tl.maximum(least, low), bound)
    step = (bound - least).to(tl.float64) * (i.to(tl.float64) / (T - 1))
    return tl.where(i == T - 1, least, bound - step.to(tl.int64))


@triton.jit
def _search(
    x, begin, end, wanted, slope, least, high, high_reach, high_rest, low, low_reach, low_rest, bound, searching,
    POWER: tl.constexpr, T: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The threshold of a row, how many weights reach it and the sum of the others; begins where `_judge` ended."""
    while searching:
        theta = _next(high, high_reach, high_rest, low, low_reach, low_rest, bound, wanted, T)
        reach, rest = _count(x, begin, end, theta, slope, least, POWER, T, BC)
        high, high_reach, high_rest, low, low_reach, low_rest, bound, searching = _judge(
            theta, reach, rest, wanted, low, low_reach, low_rest
        )
    return high, high_reach, high_rest


@triton.jit
def _ticks(before, left, total, inverse, shift):
    """floor((before left + shift) / total): columns drawn of those with that sum of weights. All int64, exact."""
    product = before * left + shift
    found = (product.to(tl.float64) * inverse).to(tl.int64)
    over = product - found * total
    return found + (over >= total).to(tl.int64) - (over < 0).to(tl.int64)


@triton.jit
def _emit(
    x, lo, hi, begin, end, done, before, threshold, left, total, offset, slope, least, columns, weights, factors,
    POWER: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the entries of columns [lo, hi): `done` certain ones and weights of `before` come before these."""
    n = tl.arange(0, BN)
    wide = total.to(tl.float64)
    inverse, share = 1.0 / wide, left.to(tl.float64) / wide
    shift = tl.minimum((offset * wide).to(tl.int64), total - 1)
    raw = tl.load(x + lo + n, mask=lo + n < hi, other=0.0)
    for at in range(lo, hi, BN):
        column = at + n
        following = tl.load(x + column + BN, mask=column + BN < hi, other=0.0)
        there = column < hi
        middle = there & (column >= begin) & (column < end)
        w = _weight(raw, middle, slope, least, POWER)
        sure = there & (~middle | (w >= threshold))
        w = tl.where(sure, 0, w)
        until = before + tl.cumsum(w, 0)
        drawn = _ticks(until - w, left, total, inverse, shift)
        take = sure | (_ticks(until, left, total, inverse, shift) > drawn)
        each = sure.to(tl.int32)
        place = done + tl.cumsum(each, 0) - each + drawn.to(tl.int32)
        pi = tl.where(sure | ~take, 1.0, w.to(tl.float64) * share)
        tl.store(columns + place, column, mask=take)
        tl.store(weights + place, 0.0 - tl.log(pi.to(tl.float32)), mask=take)
        tl.store(factors + place, (1.0 - pi).to(tl.float32), mask=take)
        before += tl.sum(w, 0)
        done += tl.sum(each, 0)
        raw = following


@triton.jit
def _without(wanted, size):
    """(threshold, left, total) of a row where nothing is to be drawn: all of its columns are certain, or none."""
    none = tl.full((), 0, tl.int64)
    return tl.where(wanted >= size, none, ENDLESS), none, none + 1


@triton.jit
def _part(length, BN: tl.constexpr):
    """Columns [lo, hi) of this program: whole tiles of BN."""
    tiles = tl.cdiv(tl.cdiv(length, BN), tl.num_programs(1))
    lo = tl.minimum(tl.program_id(1) * tiles * BN, length)
    return lo, tl.minimum(lo + tiles * BN, length)


@triton.jit
def alone(
    given, offset, found, UNIFORM: tl.constexpr, POWER: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
    BC: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A whole row by one program, BN columns at a time, BC where thresholds are tried.

    found: columns, used, log-weights, factors.
    """
    columns, used, weights, factors = found
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    x, length, count, k, begin, end, wanted = _row_of(row, given)
    tl.store(used + row, count)
    if k > 0:
        size = end - begin
        threshold, left, total = _without(wanted, size)
        slope, least = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        if (wanted > 0) & (wanted < size):
            slope, least, scale = _line(_sum(x, begin, end, POWER, BN), wanted, size, UNIFORM)
            theta, low, low_reach, low_rest = _first(least, scale, wanted, size, T)
            reach, rest = _count(x, begin, end, theta, slope, least, POWER, T, BC)
            high, high_reach, high_rest, low, low_reach, low_rest, bound, searching = _judge(
                theta, reach, rest, wanted, low, low_reach, low_rest
            )
            threshold, high_reach, total = _search(
                x, begin, end, wanted, slope, least, high, high_reach, high_rest, low, low_reach, low_rest, bound,
                searching, POWER, T, BC,
            )  # fmt: skip
            left = wanted - high_reach
        to = row.to(tl.int64) * given[10]
        _emit(
            x, 0, length, begin, end, tl.full((), 0, tl.int32), tl.full((), 0, tl.int64), threshold, left, total,
            tl.load(offset + row).to(tl.float64), slope, least, columns + to, weights + to, factors + to, POWER, BN,
        )  # fmt: skip
    if CHAINED and not EARLY:
        gdc_launch_dependents()


@triton.jit
def total(given, used, sums, POWER: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr):
    """The sum of the scores of each part. sums: fp64 [rows, parts]."""
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    x, length, count, k, begin, end, wanted = _row_of(row, given)
    lo, hi = _part(length, BN)
    if tl.program_id(1) == 0:
        tl.store(used + row, count)
    if (wanted > 0) & (wanted < end - begin):
        found = _sum(x, tl.maximum(lo, begin), tl.minimum(hi, end), POWER, BN)
        tl.store(sums + row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), found)


@triton.jit
def _recall(memory, row, T: tl.constexpr, PARTS: tl.constexpr):
    """Of the last round: theta [T], low, low_reach, low_rest, and of each part [PARTS, T] reach and rest."""
    state, reach, rest = memory
    parts = tl.num_programs(1)
    i, part = tl.arange(0, T), tl.arange(0, PARTS)
    mine = state + row.to(tl.int64) * (T + 3)
    theta = tl.load(mine + i)
    low, low_reach, low_rest = tl.load(mine + T), tl.load(mine + T + 1), tl.load(mine + T + 2)
    entry = (row.to(tl.int64) * parts + part)[:, None] * T + i[None, :]
    there = (part < parts)[:, None] & (i >= 0)[None, :]
    reached = tl.load(reach + entry, mask=there, other=0).to(tl.int64)
    return theta, low, low_reach, low_rest, reached, tl.load(rest + entry, mask=there, other=0)


@triton.jit
def look(
    given, sums, whole, last, memory, FIRST: tl.constexpr, UNIFORM: tl.constexpr, POWER: tl.constexpr, T: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A pass over each part: how many weights reach each of T thresholds, and the sum of the others.

    whole: fp64 [rows], written by the first round. last, memory: of the last round and of this one: state int64
    [rows, T + 3], see `_recall`; reach int32 and rest int64 [rows, parts, T]. PARTS: at least the number of parts.
    """
    state, reach, rest = memory
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    x, length, count, k, begin, end, wanted = _row_of(row, given)
    size = end - begin
    if (wanted > 0) & (wanted < size):
        parts, i = tl.num_programs(1), tl.arange(0, T)
        if FIRST:
            part = tl.arange(0, PARTS)
            each = tl.load(sums + row.to(tl.int64) * parts + part, mask=part < parts, other=0.0)
            scored = tl.sum(each, 0)
            slope, least, scale = _line(scored, wanted, size, UNIFORM)
            theta, low, low_reach, low_rest = _first(least, scale, wanted, size, T)
            if tl.program_id(1) == 0:
                tl.store(whole + row, scored)
        else:
            slope, least, scale = _line(tl.load(whole + row), wanted, size, UNIFORM)
            theta, low, low_reach, low_rest, reached, rests = _recall(last, row, T, PARTS)
            high, high_reach, high_rest, low, low_reach, low_rest, bound, searching = _judge(
                theta, tl.sum(reached, 0), tl.sum(rests, 0), wanted, low, low_reach, low_rest
            )
            theta = _next(high, high_reach, high_rest, low, low_reach, low_rest, bound, wanted, T)
        if tl.program_id(1) == 0:
            mine = state + row.to(tl.int64) * (T + 3)
            tl.store(mine + i, theta)
            tl.store(mine + T, low)
            tl.store(mine + T + 1, low_reach)
            tl.store(mine + T + 2, low_rest)
        lo, hi = _part(length, BN)
        mine_reach, mine_rest = _count(x, tl.maximum(lo, begin), tl.minimum(hi, end), theta, slope, least, POWER, T, BC)
        entry = (row.to(tl.int64) * parts + tl.program_id(1)) * T + i
        tl.store(reach + entry, mine_reach.to(tl.int32))
        tl.store(rest + entry, mine_rest)


@triton.jit
def write(
    given, offset, whole, last, found, UNIFORM: tl.constexpr, POWER: tl.constexpr, T: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The entries of each part, behind those of all parts before. found: as in `alone`.

    EARLY: the next kernel may start at once, else when this one is done.
    """
    columns, used, weights, factors = found
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    x, length, count, k, begin, end, wanted = _row_of(row, given)
    lo, hi = _part(length, BN)
    if (k > 0) & (lo < hi):
        size = end - begin
        threshold, left, total = _without(wanted, size)
        slope, least = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        sure, before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if (wanted > 0) & (wanted < size):
            slope, least, scale = _line(tl.load(whole + row), wanted, size, UNIFORM)
            theta, low, low_reach, low_rest, reached, rests = _recall(last, row, T, PARTS)
            threshold, high_reach, total, low, low_reach, low_rest, bound, searching = _judge(
                theta, tl.sum(reached, 0), tl.sum(rests, 0), wanted, low, low_reach, low_rest
            )
            i = tl.arange(0, T)
            if searching:  # each program of the row looks at all of it, so that none waits for another
                threshold, high_reach, total = _search(
                    x, begin, end, wanted, slope, least, threshold, high_reach, total, low, low_reach, low_rest, bound,
                    searching, POWER, T, BC,
                )  # fmt: skip
                ours, others = _count(
                    x, begin, tl.minimum(lo, end), tl.zeros([T], tl.int64) + threshold, slope, least, POWER, T, BC
                )
                sure, before = tl.max(ours, 0), tl.max(others, 0)
            else:
                one = i == tl.min(tl.where(theta == threshold, i, T), 0)
                mine = (tl.arange(0, PARTS) < tl.program_id(1))[:, None] & one[None, :]
                sure = tl.sum(tl.sum(tl.where(mine, reached, 0), 0), 0)
                before = tl.sum(tl.sum(tl.where(mine, rests, 0), 0), 0)
            left = wanted - high_reach
        elif wanted >= size:
            sure += tl.maximum(tl.minimum(lo, end) - begin, 0)
        sure += tl.minimum(lo, begin) + tl.maximum(lo - end, 0)
        to = row.to(tl.int64) * given[10]
        _emit(
            x, lo, hi, begin, end, sure.to(tl.int32), before, threshold, left, total,
            tl.load(offset + row).to(tl.float64), slope, least, columns + to, weights + to, factors + to, POWER, BN,
        )  # fmt: skip
    if CHAINED and not EARLY:
        gdc_launch_dependents()
