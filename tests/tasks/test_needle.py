"""Evaluation's needles are made of words that are never trained on."""

from __future__ import annotations

from random import Random

from longreach.tasks.needle import needle
from longreach.tasks.words import evaluation_words
from longreach.train.mini.keys import KeySource


def test_keys_come_from_words_kept_from_training() -> None:
    random, reserved, training = Random(1), evaluation_words(), KeySource()
    assert not (set(training.adjectives) | set(training.nouns)) & reserved
    for _ in range(200):
        fact = needle(random)
        assert set(fact.key.split("-")) <= reserved
        assert len(fact.value) == 7 and fact.value.isdigit() and fact.value[0] != "0"
        assert fact.key in fact.question and fact.value not in fact.question
        assert fact.key in fact.statement and fact.value in fact.statement
