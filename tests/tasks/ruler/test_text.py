"""What the tasks are made of."""

from __future__ import annotations

from random import Random

from longreach.tasks.ruler.text import enumeration, hidden, plain_words, words


def test_enumerations() -> None:
    assert enumeration(["a"]) == "a" and enumeration(["a", "b"]) == "a and b"
    assert enumeration(["a", "b", "c"]) == "a, b, and c"


def test_hidden_things_stand_at_their_depths_in_order() -> None:
    assert hidden(["0", "1"], [(1.0, "z"), (0.0, "a"), (0.5, "m"), (0.5, "n")]) == ["a", "0", "m", "n", "1", "z"]
    assert hidden(["0"] * 100, [(0.25, "x")]).index("x") == 25
    assert hidden([], [(0.5, "x")]) == ["x"]


def test_words_are_different_and_there_are_enough() -> None:
    found = words(Random(0))
    assert len(set(found)) == len(found) > 20_000
    assert set(found[: len(plain_words())]) == set(plain_words())
    assert found != words(Random(1)) and found == words(Random(0))
