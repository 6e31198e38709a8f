"""Common words: ten of them many times each, others a few times, the example of other words."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tests.tasks.counts import made

from longreach.tasks.ruler.common_words import CommonWords


@pytest.mark.parametrize(("room", "often", "seldom"), [(3976, 30, 3), (1000, 6, 1)])
def test_common_words_are_several_times_as_common(room: int, often: int, seldom: int) -> None:
    for seed in range(3):
        sample = made(CommonWords(), room, seed)
        example, own = sample.context.split("Below is a numbered list")[1:]
        times = Counter(re.findall(r"\d+\. (\w+)", own))
        assert {w for w, n in times.items() if n == often} == set(sample.answers) and len(sample.answers) == 10
        assert set(times.values()) == {often, seldom} and not set(times) & set(re.findall(r"\d+\. (\w+)", example))
        assert len(times) == 10 + sample.facts["others"]
        numbers = [int(n) for n in re.findall(r"(\d+)\. \w+", own)]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(("room", "often", "seldom", "words"), [(3976, 10, 3, 40), (1000, 3, 1, 20)])
def test_the_example_is_answered_right(room: int, often: int, seldom: int, words: int) -> None:
    example = made(CommonWords(), room).context.split("Below is a numbered list")[1]
    listed, answer = example.split("Question:")
    times = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert set(times.values()) == {often, seldom} and len(times) == words
    common = {word for word, n in times.items() if n == often}
    assert len(common) == 10 and set(re.findall(r"\d+\. (\w+)", answer)) == common


def test_partial_credit() -> None:
    sample = made(CommonWords(), 4000)
    named = " ".join(sample.answers[:5])
    assert CommonWords().score(named, sample) == sum(word in named for word in sample.answers) / 10 >= 0.5
