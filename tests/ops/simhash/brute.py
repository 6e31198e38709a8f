"""What simhash promises: codes by dot products, collisions by comparing all codes, u in whole fractions."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor


def code_of(x: list[float], directions: list[list[float]]) -> int:
    """The code of a vector in one table."""
    if not 0 < sum(a * a for a in x) < math.inf:
        return 0
    return sum(1 << b for b, w in enumerate(directions) if sum(a * c for a, c in zip(x, w, strict=True)) > 0)


def sampled(query: Tensor, keys: Tensor, first: int, least: int) -> list[int]:
    """Positions from `first` on whose codes [N, tables] equal a query's [tables] in at least `least` tables."""
    wanted = query.tolist()
    return [n for n, key in enumerate(keys.tolist()) if n >= first and sum(map(int.__eq__, key, wanted)) >= least]


def probability(p: float, bits: int, tables: int, least: int) -> Fraction:
    """Exactly, the probability of at least `least` of `tables` agreements of `bits` signs (Eq. 10 for least = 2)."""
    top, bottom = (number**bits for number in Fraction(p).as_integer_ratio())
    missed = sum(math.comb(tables, j) * top**j * (bottom - top) ** (tables - j) for j in range(least))
    return 1 - Fraction(missed, bottom**tables)
