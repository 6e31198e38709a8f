"""The plan that is written out is the one in the text."""

from __future__ import annotations

import re
from random import Random

from longreach.train.mini.forms.plan import plan
from longreach.train.mini.materials import Materials


def test_items_follow_the_plan(materials: Materials) -> None:
    for seed in range(10):
        page = plan(Random(seed), 1500, materials)
        text = materials.tokenizer.decode(page.context, skip_special_tokens=False)
        (planned,) = re.findall(r"numbered items: ((?:\d+\. \w+\.\s*)+)", text)
        question, answer = (materials.tokenizer.decode(part) for part in page.exchanges[0])
        written = re.findall(r"^(\d+\. \w+)", f"{question.rsplit('about it. ', 1)[1]}{answer}", re.MULTILINE)
        assert written == re.findall(r"\d+\. \w+", planned) and len(written) >= 3
