# mypy: ignore-errors
"""The first kernel of top_k for long rows: two values that the k-th largest lies between, from a sample of the row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.top_k import triton_keys as keys
from longreach.ops.top_k.triton_keys import LEAST, OVER, UNDER

# what is kept of a row: the key from which values are chosen, that from which they are candidates, whether
HIGH, LOW, TIED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # values at the ends are marked as ties;
KIND, TAKE, SEARCHED = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)  # which ties are taken, how many; slow path
MARKS = tl.constexpr(8)


@triton.jit
def drawn(i, size, SAMPLES: tl.constexpr):
    """The i-th column of a sample of SAMPLES out of `size` or fewer: anywhere in the i-th of as many even stretches."""
    begin = i.to(tl.int64) * size // SAMPLES
    width = (i + 1).to(tl.int64) * size // SAMPLES - begin
    mixed = i.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    return (begin + ((mixed >> 16).to(tl.int64) * width >> 16)).to(tl.int32)


@triton.jit
def bracket(
    given, space, used, SAMPLES: tl.constexpr, SIGMAS: tl.constexpr, SLACK: tl.constexpr, CHAINED: tl.constexpr
):
    """Where a row's k-th value lies: between the samples SIGMAS standard deviations above and below its expected rank.

    Both are found to SLACK samples, further out rather than in. given: see keys.row_of; space: see Space in triton.py.
    """
    marks, counter = space[0], space[1]
    row = tl.program_id(0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    x, length, k, first, stop, busy = keys.row_of(row, given)
    tl.store(used + row, k)
    tl.store(counter + row, 0)
    rank = k - first - (length - stop)
    size = stop - first
    i = tl.arange(0, SAMPLES)
    column = first + tl.where(size <= SAMPLES, i, drawn(i, size, SAMPLES))
    key = keys.key_of(tl.load(x + column, mask=(i < size) & busy & (rank > 0), other=float("nan")).to(tl.float32))

    draws = tl.minimum(size, SAMPLES)
    share = rank.to(tl.float32) / tl.maximum(size, 1).to(tl.float32)
    mean = tl.where(size <= SAMPLES, rank.to(tl.float32), draws.to(tl.float32) * share)
    # the tails of a binomial distribution: a normal one's, and more where few samples are expected (Bernstein)
    spread = SIGMAS * tl.sqrt(mean * (1.0 - share)) + SIGMAS * SIGMAS / 3
    spread = tl.where(size <= SAMPLES, 0.0, spread)
    upper = tl.floor(mean - spread).to(tl.int32)
    lower = tl.ceil(mean + spread).to(tl.int32)

    # [a, b) holds the key of that rank in the sample; over_a, over_b, under_a, under_b: samples at or above these
    seek_high, seek_low = (rank > 0) & (upper > 0), (rank > 0) & (lower <= draws)
    least = tl.min(tl.where(i < size, key, OVER), 0)
    past = tl.max(key, 0) + 1
    high_a, high_b = least, tl.where(seek_high, past, OVER)
    low_a, low_b = tl.where(seek_low, least, LEAST), past
    over_a, over_b, under_a, under_b = draws, tl.full((), 0, tl.int32), draws, tl.full((), 0, tl.int32)
    high_even, low_even = seek_high, seek_low
    highest, lowest = upper - SLACK, lower + SLACK  # good enough
    seek_high = seek_high & (high_b - high_a != 1) & (over_b < highest)
    seek_low = seek_low & (low_b - low_a != 1) & (under_a > lowest)
    while seek_high | seek_low:
        high_m = keys.aim(upper - SLACK / 2, high_a, high_b, over_a, over_b, high_even, 0.5)
        low_m = keys.aim(lower + SLACK / 2, low_a, low_b, under_a, under_b, low_even, 0.5)
        over, under = keys.reaching(key, high_m, low_m)
        held = over_a - over_b
        up, down = seek_high & (over >= upper), seek_high & (over < upper)
        high_a, over_a = tl.where(up, high_m, high_a), tl.where(up, over, over_a)
        high_b, over_b = tl.where(down, high_m, high_b), tl.where(down, over, over_b)
        high_even = 2 * (over_a - over_b) <= held
        held = under_a - under_b
        up, down = seek_low & (under >= lower), seek_low & (under < lower)
        low_a, under_a = tl.where(up, low_m, low_a), tl.where(up, under, under_a)
        low_b, under_b = tl.where(down, low_m, low_b), tl.where(down, under, under_b)
        low_even = 2 * (under_a - under_b) <= held
        seek_high = seek_high & (high_b - high_a != 1) & (over_b < highest)
        seek_low = seek_low & (low_b - low_a != 1) & (under_a > lowest)

    tie_high = (rank > 0) & (high_b - high_a == 1) & (over_b < highest)
    tie_low = (rank > 0) & (low_b - low_a == 1) & (under_a > lowest)
    high = tl.where(tie_high, high_a, high_b)
    low = tl.where(tie_low, low_b, low_a)
    high, low = tl.maximum(high, UNDER), tl.where(rank > 0, tl.maximum(low, UNDER), OVER)  # numbers, or past them
    row_marks = marks + row.to(tl.int64) * MARKS
    tl.store(row_marks + HIGH, high.to(tl.int32))
    tl.store(row_marks + LOW, low.to(tl.int32))
    tl.store(row_marks + TIED, (tie_high | tie_low).to(tl.int32))
