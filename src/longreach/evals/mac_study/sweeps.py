"""Sweeps of thresholds over the samples: share accepted, share skipped, and error of outputs.

A sample is a row and query head of a layer with its nearest earlier row: distance, error of the output that reuses it,
and the share of the context that is then not read (the paper's (p - r)+ / m). Misses are exact and read everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """All of one shape; distance inf where there was no row to take."""

    distance: Tensor
    error: Tensor
    skipped: Tensor


class Point(NamedTuple):
    """Means over samples, misses counted as 0: accepted; skipped; error; and error_reused over the accepted alone, None
    where there are none."""

    accepted: float
    skipped: float
    error: float
    error_reused: float | None


def point(samples: Samples, accepted: Tensor) -> Point:
    """The result of accepting these samples (bool, of their shape)."""
    n, hits = max(1, accepted.numel()), int(accepted.sum())
    error, skipped = (float((x.double() * accepted).sum()) for x in (samples.error, samples.skipped))
    return Point(hits / n, skipped / n, error / n, error / hits if hits else None)


def below(samples: Samples, limit: float | Tensor) -> Tensor:
    """bool: samples that are near enough. limit: squared distance, or one a sample."""
    return samples.distance < limit


def at_acceptance(samples: Samples, shares: Sequence[float]) -> list[Point]:
    """One threshold for all samples, such that these shares of them are accepted. Of ties all are or none, whichever is
    nearer; those without a row never are."""
    order = samples.distance.flatten().sort().values
    found = []
    for share in shares:
        count = min(round(share * len(order)), len(order))
        limit = order[count] if count < len(order) else order.new_tensor(torch.inf)
        first, last = (int(torch.searchsorted(order, limit, right=right)) for right in (False, True))
        together = bool(limit < torch.inf) and last - count < count - first
        found.append(point(samples, samples.distance <= limit if together else samples.distance < limit))
    return found


def layer_by_layer(samples: Samples, shares: Sequence[float]) -> list[Point]:
    """As `at_acceptance`, each layer (the first dimension) with a threshold of its own: means over layers."""
    layers = [at_acceptance(Samples(*x), shares) for x in zip(*samples, strict=True)]
    return [_mean(points) for points in zip(*layers, strict=True)]


def at_skipped(samples: Samples, shares: Sequence[float]) -> list[Point | None]:
    """One threshold for all samples, the least at which these shares of what is read are skipped (ties are all
    accepted); None beyond what can be."""
    order = samples.distance.flatten().argsort()
    error, skipped, distance = (x.flatten()[order].double() for x in (samples.error, samples.skipped, samples.distance))
    total = len(order)
    skipped = torch.where(distance < torch.inf, skipped, 0).cumsum(0) / total
    error = torch.where(distance < torch.inf, error, 0).cumsum(0)
    found: list[Point | None] = []
    for share in shares:
        last = int((skipped < share).sum())
        if last == total:
            found.append(None)
            continue
        last = int(torch.searchsorted(distance, distance[last], right=True)) - 1
        found.append(Point((last + 1) / total, float(skipped[last]), float(error[last] / total),
                           float(error[last] / (last + 1))))  # fmt: skip
    return found


def _mean(points: Sequence[Point]) -> Point:
    some = [p.error_reused for p in points if p.error_reused is not None]
    accepted, skipped, error = (sum(x) / len(points) for x in zip(*(p[:3] for p in points), strict=True))
    return Point(accepted, skipped, error, sum(some) / len(some) if some else None)
