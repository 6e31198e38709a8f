# mypy: ignore-errors
"""A running softmax over gathered rows, for the Numba kernels of several ops."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from longreach.ops.numba_dots import AHEAD, row_ahead
from longreach.ops.numba_math import INLINE, KERNEL, exp, to_float


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def _add_values_of_two(v, places, n, s, out, dim, size, lines):
    """`add_values` for two heads, which share a converted value."""
    o0, o1 = out[0], out[1]
    for c in range(n):
        if c + AHEAD < n:
            row_ahead(v, places[c + AHEAD], size, lines)
        row = v[places[c] : places[c] + dim]
        p0, p1 = s[0, c], s[1, c]
        for d in range(dim):
            x = to_float(row[d])
            o0[d] += p0 * x
            o1[d] += p1 * x


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def add_values(v, places, n, s, out, dim, size, lines):
    """out[h] += s[h, c] v at places[c]."""
    width = out.shape[0]
    if width == 2:
        return _add_values_of_two(v, places, n, s, out, dim, size, lines)
    for c in range(n):
        if c + AHEAD < n:
            row_ahead(v, places[c + AHEAD], size, lines)
        row = v[places[c] : places[c] + dim]
        h = 0
        while h + 4 <= width:
            p0, p1, p2, p3 = s[h, c], s[h + 1, c], s[h + 2, c], s[h + 3, c]
            o0, o1, o2, o3 = out[h], out[h + 1], out[h + 2], out[h + 3]
            for d in range(dim):
                x = to_float(row[d])
                o0[d] += p0 * x
                o1[d] += p1 * x
                o2[d] += p2 * x
                o3[d] += p3 * x
            h += 4
        while h < width:
            p, one = s[h, c], out[h]
            for d in range(dim):
                one[d] += p * to_float(row[d])
            h += 1


@njit(**INLINE, fastmath=KERNEL["fastmath"])
def soften(s, n, added, weighted, softcap, top, total, out, dim):
    """Logits to weights over the largest logit so far; what was summed before is brought to the same scale."""
    for h in range(out.shape[0]):
        row = s[h]
        if softcap > 0.0:
            for c in range(n):
                row[c] = softcap * np.float32(math.tanh(row[c] / softcap))
        if weighted:
            for c in range(n):
                row[c] += added[c]
        most = top[h]
        for c in range(n):
            most = max(most, row[c])
        if most == np.float32(-np.inf):  # nothing weighs anything yet, but NaN must stay NaN
            for c in range(n):
                row[c] = np.float32(0.0) if row[c] == row[c] else row[c]
                total[h] += row[c]
            if total[h] != total[h]:
                top[h] = np.float32(0.0)
            continue
        if most > top[h]:
            fewer = exp(top[h] - most)
            total[h] *= fewer
            one = out[h]
            for d in range(dim):
                one[d] *= fewer
            top[h] = most
        z = np.float32(0.0)
        for c in range(n):
            p = exp(row[c] - most)
            row[c] = p
            z += p
        total[h] += z


@njit(**KERNEL)
def merge(top, total, out, lse, merged):
    """The pieces of each unit: lse [units, width], merged [units, width, D]."""
    units, parts, width, dim = out.shape
    for unit in range(units):
        for h in range(width):
            most = np.float32(-np.inf)
            for part in range(parts):
                most = max(most, top[unit, part, h])
            one = merged[unit, h]
            one[:] = np.float32(0.0)
            lse[unit, h] = np.float32(-np.inf)
            if most == np.float32(-np.inf):
                continue
            z = np.float32(0.0)
            for part in range(parts):
                share = exp(top[unit, part, h] - most)
                z += share * total[unit, part, h]
                piece = out[unit, part, h]
                for d in range(dim):
                    one[d] += share * piece[d]
            for d in range(dim):
                one[d] /= z
            lse[unit, h] = most + np.float32(math.log(z))
