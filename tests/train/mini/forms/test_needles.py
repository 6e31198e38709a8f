"""Every question about facts has one answer, which stands in the text."""

from __future__ import annotations

from random import Random

import pytest

from longreach.tasks.ruler.text import enumeration
from longreach.train.mini.forms.needles import alike, draw_facts, essay, exchanges, noise, order
from longreach.train.mini.keys import KeySource
from longreach.train.mini.materials import Materials


@pytest.mark.parametrize("seed", range(40))
def test_facts_are_distinct_and_all_asked_about(seed: int) -> None:
    random = Random(seed)
    _, facts = draw_facts(random, KeySource(["alpha", "beta", "gamma"]), 8)
    values = [value for fact in facts for value in fact.values]
    assert len({fact.key for fact in facts}) == 8 and len(set(values)) == len(values)
    stated = order(random, facts)
    for fact in facts:
        mine = [s for s in stated if fact.key in s]
        assert len(mine) == len(fact.values) and mine == fact.statements
        assert all(value in s for value, s in zip(fact.values, mine, strict=True))
    asked = exchanges(random, facts)
    for fact in facts:
        (exchange,) = [e for e in asked if fact.key in e.question]
        assert enumeration(fact.values) in exchange.answer or all(v in exchange.answer for v in fact.values)
        assert not any(value in exchange.question for value in fact.values)


@pytest.mark.parametrize("form", [essay, noise, alike])
def test_answers_stand_in_the_text(materials: Materials, form: object) -> None:
    several = together = 0
    for seed in range(40):
        page = form(Random(seed), 900, materials)  # type: ignore[operator]
        text = materials.tokenizer.decode(page.context, skip_special_tokens=False)
        for question, answer in page.exchanges:
            values = materials.tokenizer.decode(answer).strip().replace(", and ", ", ").replace(" and ", ", ")
            assert all(value in text for value in values.split(", "))
            several += ", " in values
            together += " and " in materials.tokenizer.decode(question)
    assert several and together
