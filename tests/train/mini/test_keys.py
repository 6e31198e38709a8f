"""Training keys: none lies within another, none is made of evaluation's words."""

from __future__ import annotations

import re
from random import Random

import pytest

from longreach.tasks.words import evaluation_words
from longreach.train.mini.keys import KeySource


@pytest.mark.parametrize("seed", range(20))
def test_distinct_keys(seed: int) -> None:
    source = KeySource(["alpha", "beta", "gamma", *sorted(evaluation_words())[:50]])
    keys = source.distinct(Random(seed), 24)
    assert not any(a != b and a in b for a in keys for b in keys) and len(set(keys)) == 24
    assert not {word.lower() for key in keys for word in re.findall(r"[A-Za-z]{3,}", key)} & evaluation_words()
    assert keys == source.distinct(Random(seed), 24) != source.distinct(Random(seed + 1), 24)


def test_a_relative_shares_all_but_one_word() -> None:
    source, random = KeySource(), Random(0)
    for _ in range(50):
        a, b = source.relative(random, "icy barn").split()
        assert a == "icy" or b == "barn"
