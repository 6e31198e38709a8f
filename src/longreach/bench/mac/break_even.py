"""From which hit rate on a step is faster than another."""

from __future__ import annotations

from collections.abc import Sequence


def break_even(times: Sequence[tuple[float, float]], other: float) -> float | None:
    """The hit rate past which all times lie below `other`, on straight lines between them: 0 where all lie below, None
    where the last does not. times: (hit rate, time), rates ascending.
    """
    later: tuple[float, float] | None = None
    for rate, time in reversed(times):
        if time >= other:
            if later is None:
                return None
            high, less = later
            return rate + (high - rate) * (time - other) / (time - less)
        later = rate, time
    return 0.0
