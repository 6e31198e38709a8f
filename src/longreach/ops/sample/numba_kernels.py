# mypy: ignore-errors
"""The Numba kernels of sample and draw, in fp64 like the reference."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.numba_math import INLINE, KERNEL

NEAR = 1e-9  # a sum of probabilities this near to the whole number that it should be is that number
SURE = 1e-12  # a probability this near to 1 is 1


@njit(**INLINE)
def _score(x):
    """fp64 of a score: 0 for negative ones, NaN and infinities."""
    wide = np.float64(x)
    return wide if 0.0 < wide < np.inf else 0.0


@njit(**INLINE)
def _place(total, n, share):
    """The first of the n ascending sums that exceeds a share, n for none."""
    low, high = np.int64(0), np.int64(n)
    while low < high:
        middle = (low + high) // 2
        if total[middle] <= share:
            low = middle + 1
        else:
            high = middle
    return low


@njit(**KERNEL)
def draw(worker, workers, x, count, length, numbers, results):
    """Independent draws of every `workers`-th row; see `sample.draw`.

    x: [L, heads, N]. count: int64 [L, heads]. length: int64 [L]. numbers: float64 [L, heads, C]. results, written:
    columns int32, log-weights and factors float32 [L, heads, C], used int32 [L, heads].
    """
    columns, weights, factors, used = results
    lists, heads, size = x.shape
    total, times = np.empty(size, np.float64), np.zeros(size, np.int32)
    for item in range(worker, lists * heads, workers):
        row, h = item // heads, item % heads
        n = length[row]
        wanted = min(max(count[row, h], 0), numbers.shape[2])
        whole = 0.0
        for c in range(n):
            whole += _score(x[row, h, c])
            total[c] = whole
        even = not whole > 0.0
        if even:
            whole = np.float64(n)
            for c in range(n):
                total[c] = np.float64(c + 1)
        wanted = wanted if n > 0 else 0
        for i in range(wanted):
            hit = _place(total, n, numbers[row, h, i] * whole)
            if hit < n:
                times[hit] += 1
        found = 0
        for c in range(n):
            if times[c] == 0:
                continue
            p = (1.0 if even else _score(x[row, h, c])) / whole
            columns[row, h, found] = c
            factors[row, h, found] = 1.0 / np.float64(times[c])
            weights[row, h, found] = math.log(np.float64(times[c])) - math.log(p) - math.log(np.float64(wanted))
            times[c] = 0
            found += 1
        used[row, h] = found


@njit(**KERNEL)
def sample(worker, workers, x, count, length, offset, numbers, results):
    """Systematic samples of every `workers`-th row; see `sample.sample`.

    x, count, length: as in `draw`; counts are at most the lengths. offset: float64 [L, heads]. numbers: uniform, power,
    first, last. results: as in `draw`, without used, for lists of C columns; a row with a larger count is left out.
    """
    columns, weights, factors = results
    uniform, power, first, last = numbers
    lists, heads, size = x.shape
    pi = np.empty(size, np.float64)
    for item in range(worker, lists * heads, workers):
        row, h = item // heads, item % heads
        n, k = length[row], count[row, h]
        if k > columns.shape[2]:
            continue
        recent = min(k, last)
        early = min(k - recent, first)
        begin, end = min(early, n - recent), n - recent  # of the columns that may be drawn
        wanted, open_ = np.float64(k - recent - begin), end - begin
        whole = 0.0
        for c in range(begin, end):
            score = _score(x[row, h, c])
            pi[c] = score if power == 1.0 else score**power
            whole += pi[c]
        for c in range(begin, end):
            p = (1.0 - uniform) * pi[c] / whole + uniform / open_ if whole > 0.0 else 1.0 / open_
            pi[c] = p
        certain = 0
        if wanted >= open_:
            certain = open_
        while certain < open_ and certain < wanted:  # the largest are certain: the others share what is left
            rest = 0.0
            for c in range(begin, end):
                rest += pi[c] if pi[c] < np.inf else 0.0
            share, more = (wanted - certain) / max(rest, 2.2250738585072014e-308), 0
            for c in range(begin, end):
                if pi[c] < np.inf and pi[c] * share > 1.0 + SURE:
                    pi[c] = np.inf
                    more += 1
            certain += more
            if more == 0:
                break
        rest = 0.0
        for c in range(begin, end):
            rest += pi[c] if pi[c] < np.inf else 0.0
        share = max(wanted - certain, 0.0) / max(rest, 2.2250738585072014e-308)
        sure = 0
        for c in range(begin, end):
            one = 1.0 if wanted >= open_ else min(pi[c] * share, 1.0) if pi[c] < np.inf else 1.0
            pi[c] = 1.0 if one > 1.0 - SURE else one
            sure += 1 if pi[c] >= 1.0 else 0
        left, total, before, found = wanted - sure, 0.0, 0.0, 0
        for c in range(n):
            if c < begin or c >= end:
                columns[row, h, found], weights[row, h, found] = c, np.float32(0.0)
                factors[row, h, found] = np.float32(0.0)
                found += 1
                continue
            take = pi[c] >= 1.0
            if not take:
                total += pi[c]
                summed = left if total > left - NEAR else total  # rounding adds no column and loses none
                step = math.floor(summed + offset[row, h])
                take = step > before
                before = step
            if take and found < columns.shape[2]:
                columns[row, h, found], weights[row, h, found] = c, -math.log(pi[c])
                factors[row, h, found] = 1.0 - pi[c]
                found += 1
