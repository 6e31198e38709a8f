"""Frequent words: counts of a zeta law, the three after the dots asked for, none of them in doubt."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.tasks.counts import made

from longreach.tasks.ruler.frequent_words import DOTS, FrequentWords


@pytest.mark.parametrize("room", [140, 300, 1000, 4000, 50_000])
def test_frequent_words_follow_the_law(room: int) -> None:
    sample = made(FrequentWords(), room)
    times = Counter(sample.context.split("coded words.\n")[1].split())
    ranked = [word for word, _ in times.most_common(5)]
    assert ranked[0] == DOTS and set(ranked[1:4]) == set(sample.answers) and times[ranked[3]] > times[ranked[4]]
    assert [times[answer] for answer in sample.answers] == sample.facts["times"]
    assert times[ranked[1]] == pytest.approx(times[DOTS] / 4, abs=1)
    assert times[ranked[2]] == pytest.approx(times[DOTS] / 9, abs=1)


def test_partial_credit() -> None:
    sample = made(FrequentWords())
    assert FrequentWords().score(f"1. {sample.answers[0].upper()}", sample) == pytest.approx(1 / 3)
