"""The overlap check finds what a search for all windows of 64 characters finds."""

from __future__ import annotations

from random import Random

import pytest

from longreach.train.mini.overlap import WINDOW, OverlapIndex, normalise


def letters(random: Random, count: int) -> str:
    return "".join(random.choice("abcd ") for _ in range(count))


@pytest.mark.parametrize("shared", [WINDOW - 1, WINDOW, WINDOW + 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_stretch_is_found_from_64_characters_on(shared: int, seed: int) -> None:
    random = Random(seed)
    held = normalise(letters(random, 500))
    other = "x" * 40 + held[100 : 100 + shared].strip().ljust(shared, "z") + "y" * 40
    brute = any(other[i : i + WINDOW] in held for i in range(len(other) - WINDOW + 1))
    assert OverlapIndex([held]).hits(other) == brute
    assert brute == (shared >= WINDOW and " " not in (held[100], held[99 + shared]))


def test_wrapping_and_case_hide_nothing() -> None:
    held = "The quick brown fox jumps over the lazy dog while the cat looks on from its window sill."
    assert OverlapIndex([held]).hits(held.upper().replace(" ", "\n   "))
    assert not OverlapIndex([held]).hits(held.replace("fox", "wolf").replace("cat", "bird"))


def test_short_texts_have_no_windows() -> None:
    assert not OverlapIndex(["short"]).hits("short")
    assert not OverlapIndex([]).hits("anything " * 20)
