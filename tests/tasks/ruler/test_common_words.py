"""Common words: ten of them thirty times each, others three times, the example of other words."""

from __future__ import annotations

import re
from collections import Counter

from tests.tasks.counts import made

from longreach.tasks.ruler.common_words import CommonWords


def test_common_words_are_ten_times_as_common() -> None:
    for seed in range(3):
        sample = made(CommonWords(), 4000, seed)
        example, own = sample.context.split("Below is a numbered list")[1:]
        times = Counter(re.findall(r"\d+\. (\w+)", own))
        assert {w for w, n in times.items() if n == 30} == set(sample.answers) and len(sample.answers) == 10
        assert set(times.values()) == {30, 3} and not set(times) & set(re.findall(r"\d+\. (\w+)", example))
        assert len(times) == 10 + sample.facts["others"]
        numbers = [int(n) for n in re.findall(r"(\d+)\. \w+", own)]
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_example_is_answered_right() -> None:
    example = made(CommonWords(), 4000).context.split("Below is a numbered list")[1]
    listed, answer = example.split("Question:")
    common = {word for word, n in Counter(re.findall(r"\d+\. (\w+)", listed)).items() if n > 1}
    assert len(common) == 10 and set(re.findall(r"\d+\. (\w+)", answer)) == common


def test_partial_credit() -> None:
    sample = made(CommonWords(), 4000)
    named = " ".join(sample.answers[:5])
    assert CommonWords().score(named, sample) == sum(word in named for word in sample.answers) / 10 >= 0.5
