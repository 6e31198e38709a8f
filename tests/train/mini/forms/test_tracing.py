"""Chains: following the assignments in the text gives the answer."""

from __future__ import annotations

import re
from random import Random

from longreach.train.mini.forms.tracing import tracing
from longreach.train.mini.materials import Materials


def test_the_answer_is_what_the_text_assigns(materials: Materials) -> None:
    examples = chains = 0
    for seed in range(40):
        page = tracing(Random(seed), 1600, materials)
        text = materials.tokenizer.decode(page.context)
        held: dict[str, str] = {}
        for name, of in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", text, re.MULTILINE):
            held[name] = held.get(of, of)
        for question, answer in page.exchanges:
            (value,) = set(re.findall(r"the value (\d+)", materials.tokenizer.decode(question)))
            names = materials.tokenizer.decode(answer).split()
            assert names == [name for name, of in held.items() if of == value]
        examples += text.count("Answer:")
        chains += len(page.exchanges) > 1
    assert examples and chains
