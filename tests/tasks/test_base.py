"""How answers are matched."""

from __future__ import annotations

from longreach.tasks.base import all_of, any_of


def test_all_of_gives_credit_for_each() -> None:
    assert all_of("It is ABC and 12.", ("abc", "12", "34", "x")) == 0.5
    assert all_of("12 34", ("12", "34")) == 1 and all_of("", ("12",)) == 0


def test_any_of_asks_for_one() -> None:
    assert any_of("It is ABC.", ("zz", "abc")) == 1
    assert any_of("", ("a",)) == 0 and any_of("ab", ("abc",)) == 0
