"""Check the shape of JSON values, with the path of the first mismatch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {str: "text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}
Shape = Any  # a type, a mapping of required fields, Maybe, Each, Items or Number


class Mismatch(Exception):
    """A mismatch with its path: "tasks.vt.results.dense.score is missing"."""


@dataclass(frozen=True)
class Maybe:
    """A shape, or null."""

    shape: Shape


@dataclass(frozen=True)
class Perhaps:
    """A shape of a field that need not be there."""

    shape: Shape


@dataclass(frozen=True)
class Each:
    """An object whose values all have this shape. least: the smallest number of values."""

    shape: Shape
    least: int = 0


@dataclass(frozen=True)
class Items:
    """A list of this shape, of that many items or of at least one."""

    shape: Shape
    exactly: int | None = None
    least: int = 0


@dataclass(frozen=True)
class Number:
    """A number within bounds. Without bounds it may be infinite or NaN, as of a method that failed."""

    low: float = -math.inf
    high: float = math.inf


def check(value: Any, shape: Shape, where: str = "") -> None:
    """Raise Mismatch at the first value of another shape. Additional fields are allowed."""
    if isinstance(shape, Maybe):
        if value is not None:
            check(value, shape.shape, where)
    elif isinstance(shape, Number):
        good = isinstance(value, int | float) and not isinstance(value, bool) and _counts(value)
        _require(good, where, "a number", value)
        bounded = shape != Number()
        bounds = f"a number from {shape.low:g} to {shape.high:g}"
        _require(not bounded or shape.low <= value <= shape.high, where, bounds, value)
    elif isinstance(shape, Mapping):
        _require(isinstance(value, dict), where, "an object", value)
        for name, inner in shape.items():
            if isinstance(inner, Perhaps):
                if name in value:
                    check(value[name], inner.shape, _join(where, name))
                continue
            if name not in value:
                raise Mismatch(f"{_join(where, name)} is missing")
            check(value[name], inner, _join(where, name))
    elif isinstance(shape, Each):
        _require(isinstance(value, dict), where, "an object", value)
        _require(len(value) >= shape.least, where, f"at least {shape.least} entry", value)
        for name, inner in value.items():
            check(inner, shape.shape, _join(where, name))
    elif isinstance(shape, Items):
        _require(isinstance(value, list), where, "a list", value)
        _require(len(value) >= shape.least, where, f"at least {shape.least} item", value)
        if shape.exactly is not None:
            _require(len(value) == shape.exactly, where, f"{shape.exactly} items", value)
        for number, inner in enumerate(value):
            check(inner, shape.shape, f"{where}[{number}]")
    else:
        good = isinstance(value, shape) and (shape is bool or not isinstance(value, bool)) and _counts(value)
        _require(good, where, NAMES[shape], value)


def _counts(value: Any) -> bool:
    """JSON's whole numbers have no end; those of records are counts."""
    return not isinstance(value, int) or abs(value) < 1 << 63


def _require(good: bool, where: str, expected: str, value: Any) -> None:
    if not good:
        told = repr(value)
        raise Mismatch(f"{where or 'the record'}: expected {expected}, got {told[:60]}{'...' * (len(told) > 60)}")


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
