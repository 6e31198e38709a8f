"""Shapes of JSON: what passes, and where it is said to fail."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report.schema import Each, Items, Maybe, Mismatch, Number, Perhaps, check


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (1, int), ("a", str), (True, bool), ({}, dict), ([], Items(int)), (None, Maybe(int)), (3, Maybe(int)),
        (float("nan"), Number()), (float("inf"), Number()), (0, Number(0, 1)), (1.0, Number(0, 1)), ({}, Each(int)),
        ({"a": 1, "more": []}, {"a": int}), ({}, {"a": Perhaps(int)}), ({"a": 1}, {"a": Perhaps(int)}),
        ([[1.5]], Items(Items(Number()))),
    ],
)  # fmt: skip
def test_what_fits(value: Any, shape: Any) -> None:
    check(value, shape)


@pytest.mark.parametrize(
    ("value", "shape", "told"),
    [
        (True, int, "the record: expected a whole number, got True"),
        (1.0, int, "the record: expected a whole number, got 1.0"),
        (10**30, int, f"the record: expected a whole number, got {10**30}"),
        (-(10**30), Number(), f"the record: expected a number, got {-(10**30)}"),
        (1, bool, "the record: expected true or false, got 1"),
        (False, Number(), "the record: expected a number, got False"),
        (float("nan"), Number(0, 1), "the record: expected a number from 0 to 1, got nan"),
        ({"a": {}}, {"a": {"b": int}}, "a.b is missing"),
        ({"a": {"x": {"b": None}}}, {"a": Each({"b": int})}, "a.x.b: expected a whole number, got None"),
        ({"a": [{"b": 1}, {}]}, {"a": Items({"b": int})}, "a[1].b is missing"),
        ({"a": []}, {"a": Items(int, least=1)}, "a: expected at least 1 item, got []"),
        ({"a": [1]}, {"a": Items(int, exactly=2)}, "a: expected 2 items, got [1]"),
        ({"a": {}}, {"a": Each(int, least=1)}, "a: expected at least 1 entry, got {}"),
        ({"a": "x" * 99}, {"a": list}, f"a: expected a list, got '{'x' * 59}..."),
    ],
)
def test_what_does_not(value: Any, shape: Any, told: str) -> None:
    with pytest.raises(Mismatch) as error:
        check(value, shape)
    assert str(error.value) == told
