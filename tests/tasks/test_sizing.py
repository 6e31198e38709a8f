"""Sizes: as large as fits, found with few counts, refused with the least that works."""

from __future__ import annotations

import pytest

from longreach.errors import InvalidInput
from longreach.tasks.sizing import largest, too_short


@pytest.mark.parametrize(("slope", "room"), [(1, 60), (3, 1000), (7, 100_000), (0.4, 5000), (200, 10_000)])
def test_sizes_are_found_with_few_counts(slope: float, room: int) -> None:
    asked: list[int] = []

    def tokens(size: int) -> int:
        asked.append(size)
        return 50 + round(slope * size)

    size = largest(tokens, room, "x")
    assert len(asked) < 12 and max(asked) <= 2 * size + 8  # no huge text is made on the way
    assert tokens(size) <= room
    assert tokens(size) >= 0.98 * room or tokens(size + 1) > room


def test_growth_that_is_not_linear() -> None:
    for tokens in (lambda n: 10 * int(n**0.5), lambda n: n * n, lambda n: 100 + 5 * (n // 7)):
        size = largest(tokens, 4000, "x")
        assert tokens(size) <= 4000 and (tokens(size) >= 0.98 * 4000 or tokens(size + 1) > 4000)


def test_the_most_and_the_least() -> None:
    assert largest(lambda n: n, 21, "x", most=20) == 20
    assert largest(lambda n: n, 20, "x", least=20) == 20
    with pytest.raises(InvalidInput, match=r"^x fills at most 25 of 105 tokens of prompt; ask for a shorter --length"):
        largest(lambda n: n, 100, "x", most=20, beside=5)
    with pytest.raises(
        InvalidInput, match=r"^x takes at least 28 tokens of prompt and 25 are there; .* longer --length"
    ):
        largest(lambda n: n + 3, 5, "x", least=5, beside=20)


def test_less_room_than_none_is_none() -> None:
    assert "at least 113 tokens of prompt and 0 are there" in str(too_short("vt", 113, -120))
