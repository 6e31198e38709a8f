"""Means over seeds against what is expected, in standard errors of the draws themselves."""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor

NORMAL = NormalDist()
CHANCE = 2 * NORMAL.cdf(-3)  # 0.27%: of an unbiased mean to lie more than 3 standard errors away


def deviations(samples: Tensor, expected: Tensor) -> Tensor:
    """How many standard errors the mean of samples [n, ...] lies away from what is expected, fp64 [...]."""
    samples = samples.double()
    return (samples.mean(0) - expected) / (samples.std(0) / math.sqrt(len(samples))).clamp(min=1e-300)


def farthest(samples: Tensor, expected: Tensor) -> float:
    """The largest deviation of a few means, to be compared with 3."""
    return float(deviations(samples, expected).abs().max())


def check_many(samples: Tensor, expected: Tensor, power: float) -> None:
    """Assert that many means are unbiased, where some are beyond 3 standard errors by chance.

    Of n independent means no more are beyond 3 than happens with a probability of 0.27%, and none is beyond the bound
    that the largest of n exceeds with that probability (Bonferroni). power: an expectation that is too large by this
    share must fail, so that the check is not empty.
    """
    assert not _unbiased(deviations(samples, (1 + power) * expected)), "a bias of this size is not seen"
    off = deviations(samples, expected)
    assert _unbiased(off), f"{int((off.abs() > 3).sum())} of {off.numel()} beyond 3, {float(off.abs().max()):.2f}"


def _unbiased(off: Tensor) -> bool:
    count = off.numel()
    beyond = int((off.abs() > 3).sum())
    # the probability of as many or more
    tail = 1 - sum(math.comb(count, k) * CHANCE**k * (1 - CHANCE) ** (count - k) for k in range(beyond))
    return tail > CHANCE and float(off.abs().max()) < -NORMAL.inv_cdf(CHANCE / (2 * count))
