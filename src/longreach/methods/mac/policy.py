"""From MAC's options to the rule of a layer's match: threshold, profitable context, profit guard."""

from __future__ import annotations

import math

from longreach.methods.mac.plan import Scale
from longreach.ops.match import Rule

PATIENCE = 16.0  # searches without a hit that the profit guard allows before a KV head rests,
REUSES = 4.0  # or the number that this many reuses pay for: at twice the profitable rate, chance exhausts few accounts


def limit_of(scale: Scale, tau: float, dim: int) -> float:
    """The squared distance below which a threshold accepts."""
    return (1.0 - tau) ** 2 * (2.0 * dim if scale == "sqrt2d" else 1.0)


def row_price(group: int, dim: int, size: int, *, bounded: bool, values_in_keys: bool = False) -> float:
    """Bytes of one ring row of a KV head over the bytes of one key and value.

    group: query heads of the KV head. size: bytes of a number. bounded: whether depths are read too. values_in_keys:
    key and value are one vector.
    """
    row = dim * size + 4 + (2 if bounded else 0)  # query, stamp, depth
    return group * row / ((1 if values_in_keys else 2) * dim * size)


def rule_of(
    *,
    window: int,
    band: int,
    limit: float,
    sinks: int,
    price: float,
    min_context: int | None,
    max_gap: int | None,
    max_reuse_depth: int | None,
    rest_rows: int | None,
) -> Rule:
    """The rule of one layer.

    window, band, limit, sinks: the layer's own numbers, from options or a plan. price: see `row_price`. The rest are
    options of MAC: min_context=None is the shortest context in which a search can pay (Eq. 9), rest_rows=None turns
    the profit guard off.
    """
    window = window if max_gap is None else min(window, max_gap)
    profitable = math.ceil(price * window) + band + sinks
    return Rule(
        window=window,
        band=band,
        limit=limit,
        sinks=sinks,
        min_context=profitable if min_context is None else min_context,
        deepest=max_reuse_depth,
        patience=math.inf if rest_rows is None else PATIENCE,
        reuses=REUSES,
        rest=rest_rows or 1,
        price=price,
    )
