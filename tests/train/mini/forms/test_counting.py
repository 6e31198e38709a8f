"""Counting the words of the text gives the answer."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from longreach.train.mini.forms.counting import common, frequent
from longreach.train.mini.materials import Materials


@pytest.mark.parametrize("room", [511, 1500, 4000])
def test_common_words_are_the_most_common(materials: Materials, room: int) -> None:
    for seed in range(12):
        page = common(Random(seed), room, materials)
        text = materials.tokenizer.decode(page.context).rsplit("Below is a numbered list", 1)[1]
        counts = Counter(re.findall(r"\d+\. (\w+)", text))
        answer = re.findall(r"\d+\. (\w+)", materials.tokenizer.decode(page.exchanges[0][1]))
        least = min(counts[word] for word in answer)
        assert len(answer) == len(set(answer)) >= 3
        assert all(count < least for word, count in counts.items() if word not in answer)


@pytest.mark.parametrize("room", [511, 1500, 4000])
def test_frequent_words_are_the_most_frequent(materials: Materials, room: int) -> None:
    for seed in range(12):
        page = frequent(Random(seed), room, materials)
        text = materials.tokenizer.decode(page.context).split("\n")[1]
        ranked = [word for word, _ in Counter(w for w in text.split() if w != "....").most_common(3)]
        assert materials.tokenizer.decode(page.exchanges[0][1]).split() == ranked
