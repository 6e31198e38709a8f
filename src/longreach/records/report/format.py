"""Numbers and foreign text as a report writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NONE = "-"


def percent(share: float | None) -> str:
    """A share with one decimal."""
    return NONE if share is None else f"{share:.1%}"


def interval(bounds: Sequence[float]) -> str:
    """Both ends of an interval of shares."""
    low, high = bounds
    return f"{low * 100:.1f}-{high * 100:.1f}%"


def seconds(value: float | None) -> str:
    """A time with its unit."""
    if value is None:
        return NONE
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"


def times(ratio: float | None) -> str:
    """How many times as much."""
    return NONE if ratio is None else f"{ratio:.2f}x"


def number(value: float | None, digits: int = 4) -> str:
    """A number to so many digits."""
    return NONE if value is None else f"{value:.{digits}g}"


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are there; None where none is."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def cropped(text: str, most: int) -> str:
    """A text's beginning, and how long it is where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def one_line(text: str) -> str:
    """A text on one line in which nothing is invisible: what cannot be printed is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def setting(value: Any) -> str:
    """A value of a configuration."""
    return NONE if value is None else str(value)


def finite(value: float | None) -> bool:
    """Whether there is something to draw."""
    return value is not None and math.isfinite(value)
