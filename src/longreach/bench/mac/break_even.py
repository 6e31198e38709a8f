"""The hit rate from which a step is faster than another."""

from __future__ import annotations

from collections.abc import Sequence


def break_even(times: Sequence[tuple[float, float]], other: float, group: int) -> float | None:
    """The hit rate past which all times lie below `other`: 0 where all lie below, None where the last does not.

    times: (hit rate, time), rates ascending. Between them on straight lines over rate ** group, the share of KV heads
    of `group` query heads that reuse, since it is those that save.
    """
    later: tuple[float, float] | None = None
    for rate, time in reversed(times):
        reuse = rate**group
        if time >= other:
            if later is None:
                return None
            high, less = later
            return (reuse + (high - reuse) * (time - other) / (time - less)) ** (1 / group)
        later = reuse, time
    return 0.0
