"""The probability that a key is sampled, in a form that does not cancel.

A query and a key whose angle is t agree in one random sign with probability p = 1 - t / pi, in a code of `bits` signs
with x = p^bits, and in at least `least` of `tables` codes with

    u = sum over j >= least of C(tables, j) x^j (1 - x)^(tables - j)

(MagicPIG: Chen et al., 2024, arXiv 2410.16179, Eq. 10, where least = 2). 1 minus the terms below `least`, as the paper
writes it, loses all digits where u is small. So small u are summed as they stand, as positive terms. Large ones are 1
minus the terms below `least`, which then costs no digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from longreach.ops.types import describe, require

MOST_BITS, MOST_TABLES, MOST_LEAST = 16, 1024, 16
LARGE = 0.15  # u from which on it is 1 minus the rest
TINY = 2.0**-126  # the smallest normal number of fp32: a sampled key has a positive probability


@dataclass(frozen=True)
class Form:
    """Constants of u for `tables` and `least`.

    split: the x below which u is (scale x)^least (1 - x)^(tables - least) times the sum of coefficients[j] r^j, where
    r = x / (1 - x); the first `single` of them are enough for fp32, and within its range. From there on u is
    1 - (1 - x)^(tables - least + 1) P, where
    P = sum over j < least of binomials[j] x^j (1 - x)^(least - 1 - j).
    """

    split: float
    scale: float
    coefficients: tuple[float, ...]
    single: int
    binomials: tuple[float, ...]


def check_law(bits: int, tables: int, least: int) -> None:
    """Raise InvalidInput unless codes of `bits`, in `tables`, of which `least` must agree, can be computed."""
    for name, number, most in (
        ("bits", bits, MOST_BITS),
        ("tables", tables, MOST_TABLES),
        ("least", least, MOST_LEAST),
    ):
        ok = isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= most
        require(ok, lambda: f"{name}: expected an int in [1, {most}], got {number!r}")
    check_enough_tables(tables, least)


def check_enough_tables(tables: int, least: int) -> None:
    """Raise InvalidInput if a key cannot collide in `least` tables, as there are fewer."""
    require(
        tables >= least,
        lambda: (
            f"tables: expected at least {least}, as a key must collide in least={least} of them, got {tables}; give "
            f"more tables, or least={tables}"
        ),
    )


@cache
def form(tables: int, least: int) -> Form:
    """The constants of u."""

    def u(x: float) -> float:
        return sum(math.comb(tables, j) * x**j * (1 - x) ** (tables - j) for j in range(least, tables + 1))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if u(middle) < LARGE else (low, middle)
    coefficients = [1.0]
    for j in range(least, tables):
        coefficients.append(coefficients[-1] * (tables - j) / (j + 1))
    sizes = [c * (low / (1 - low)) ** j for j, c in enumerate(coefficients)]  # falling
    single, double = (sum(size > small for size in sizes) for small in (1e-8, 1e-13))
    below = tuple(float(math.comb(tables, j)) for j in range(least))
    return Form(low, math.comb(tables, least) ** (1 / least), tuple(coefficients[:double]), single, below)


def inclusion(p: Tensor, bits: int, tables: int, least: int = 2) -> Tensor:
    """The probability u that a key is sampled, for the probability p that one sign agrees: like p, fp32 or fp64.

    p: in [0, 1]; p = 1 (the query equals the key) gives exactly 1.
    Raises InvalidInput for bits outside [1, 16], tables outside [1, 1024] and least outside [1, 16] or above tables.
    """
    check_law(bits, tables, least)
    ok = isinstance(p, Tensor) and p.dtype in (torch.float32, torch.float64)
    require(ok, lambda: f"p: expected fp32 or fp64, got {describe(p)}")
    f = form(tables, least)
    x = p**bits
    q, many, series, rest = (
        1 - x,
        torch.exp((tables - least + 1) * torch.log1p(-x)),
        torch.zeros_like(x),
        torch.zeros_like(x),
    )
    single = p.dtype == torch.float32  # larger coefficients than these exceed the range of fp32
    for coefficient in reversed(f.coefficients[: f.single] if single else f.coefficients):
        series = series * (x / q) + coefficient
    small = (f.scale * x) ** least * series * (many / q)
    for j, binomial in enumerate(f.binomials):
        rest = rest * q + binomial * x**j
    large = 1 - many * rest
    return torch.where(x < f.split, small, large)
