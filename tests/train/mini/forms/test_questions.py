"""Documents about people: the answer stands in the documents about who is asked after."""

from __future__ import annotations

import re
from random import Random

from longreach.tasks.ruler.invented import people
from longreach.train.mini.forms.questions import questions
from longreach.train.mini.materials import Materials


def test_answers_follow_from_the_documents(materials: Materials) -> None:
    hops = 0
    for seed in range(25):
        page = questions(Random(seed), 1500, materials)
        text = materials.tokenizer.decode(page.context)
        lived = dict(re.findall(r"(\w+ \w+) lived in the town of (\w+)\.", text))
        rivers = dict(re.findall(r"(\w+) is a town .* lies on the river (\w+)\.", text))
        for question, answer in page.exchanges:
            asked, said = materials.tokenizer.decode(question), materials.tokenizer.decode(answer).strip()
            if found := re.search(r"which town did (.*) live", asked):
                assert said == lived[found[1]]
            elif found := re.search(r"the town in which (.*) lived lies|town in which (.*) lived\?", asked):
                hops += 1
                assert said == rivers[lived[found[1] or found[2]]]
            elif found := re.search(r"river does (\w+) lie", asked):
                assert said == rivers[found[1]]
            else:
                assert said in text
    assert hops


def test_training_people_are_not_the_evaluations(materials: Materials) -> None:
    known = {person["name"] for seed in (1, 2) for person in people(seed, 400)}
    for seed in range(10):
        text = materials.tokenizer.decode(questions(Random(seed), 1500, materials).context)
        assert not known & set(re.findall(r"(\w+ \w+) was born", text))
