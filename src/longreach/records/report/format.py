"""Format numbers and foreign text for reports."""

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
    """A ratio, as "1.50x"."""
    return NONE if ratio is None else f"{ratio:.2f}x"


def number(value: float | None, digits: int = 4) -> str:
    """A number with this many significant digits."""
    return NONE if value is None else f"{value:.{digits}g}"


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def cropped(text: str, most: int) -> str:
    """The text, cut to `most` characters; a cut text is followed by its length."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def one_line(text: str) -> str:
    """The text on one line, with unprintable characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def setting(value: Any) -> str:
    """A value of a configuration."""
    return NONE if value is None else str(value)


def finite(value: float | None) -> bool:
    """Whether the value is a finite number."""
    return value is not None and math.isfinite(value)
