"""Spread of the gaps at which the query heads of a KV head match: Table 6 of the paper."""

from __future__ import annotations

import torch
from torch import Tensor


def head_gap_spread(gap: Tensor, accepted: Tensor, group: int) -> list[dict[str, float | None]]:
    """One entry per layer. gap, accepted: [L, S, H] of rows and query heads, `group` of which share a KV head.

    average: mean over rows of the median over accepted heads of p - m (-399: 399 tokens back). spread: median over rows
    and KV heads with two accepted heads or more of the standard deviation of p - m. alike: share of those KV heads
    with the same row for all accepted heads. None if there are none.
    """
    return [_of_layer(g.double(), a, group) for g, a in zip(gap, accepted, strict=True)]


def _of_layer(gap: Tensor, accepted: Tensor, group: int) -> dict[str, float | None]:
    medians = [-x[a].quantile(0.5) for x, a in zip(gap, accepted, strict=True) if bool(a.any())]
    apart, ok = gap.unflatten(-1, (-1, group)), accepted.unflatten(-1, (-1, group))
    count = ok.sum(-1)
    several = count >= 2
    mean = (apart * ok).sum(-1) / count.clamp(min=1)
    spread = (((apart - mean[..., None]) * ok).square().sum(-1) / count.clamp(min=1)).sqrt()[several]
    some = bool(several.any())
    return {
        "average": float(torch.stack(medians).mean()) if medians else None,
        "spread": float(spread.quantile(0.5)) if some else None,
        "alike": float((spread == 0).double().mean()) if some else None,
    }
