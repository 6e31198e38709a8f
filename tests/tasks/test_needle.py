"""Needles: every question has one answer, and evaluation's words are never trained on."""

from __future__ import annotations

from random import Random

import pytest

from longreach.tasks.needle import KeySource, evaluation_episode, training_episode
from longreach.tasks.words import evaluation_words


@pytest.mark.parametrize("seed", range(30))
def test_training_questions_have_one_answer(seed: int) -> None:
    random = Random(seed)
    episode = training_episode(random, KeySource(False, ["alpha", "beta", "gamma"]), 8)
    assert sorted(episode.asked) == list(range(8))
    assert len({n.value for n in episode.needles}) == 8
    for needle in episode.needles:
        assert needle.key in needle.statement and needle.value in needle.statement
        assert needle.key in needle.question and needle.value not in needle.question
        assert sum(needle.key in other.statement for other in episode.needles) == 1


def test_evaluation_keys_come_from_words_kept_from_training() -> None:
    random, reserved = Random(1), evaluation_words()
    training, evaluation = KeySource(False), KeySource(True)
    assert not (set(training.adjectives) | set(training.nouns)) & reserved
    for _ in range(200):
        needle = evaluation_episode(random, evaluation).needles[0]
        assert set(needle.key.split()) <= reserved
        assert len(needle.value) == 7 and needle.value.isdigit() and needle.value[0] != "0"


def test_the_same_seed_gives_the_same_episode() -> None:
    source = KeySource(False)
    assert training_episode(Random(7), source, 5) == training_episode(Random(7), source, 5)
    assert training_episode(Random(7), source, 5) != training_episode(Random(8), source, 5)
