"""Invented people: every question has one answer, in the documents that are said to hold it."""

from __future__ import annotations

import re

import pytest
from tests.tasks.counts import made
from tests.tasks.ruler.test_questions import documents

from longreach.tasks.ruler.invented import people, questions


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_documents_and_their_places(hops: int, seed: int) -> None:
    sample = made(questions(f"qa_synthetic_{hops}"), seed=seed)
    found = documents(sample)
    assert len(found) == sample.facts["documents"] and len(sample.facts["depths"]) == hops
    places = [round(d * len(found)) for d in sample.facts["depths"]]
    holding = [i for i, d in enumerate(found) if sample.answers[0].lower() in d.lower()]
    assert len(holding) == 1 and holding[0] in places


def test_two_hops_lead_from_the_name_over_the_town_to_the_river() -> None:
    sample = made(questions("qa_synthetic_2"))
    found = documents(sample)
    name = re.search(r"in which (.+) lived\?", sample.question)[1]  # type: ignore[index]
    town = next(re.search(r"the town of (\w+)\.", d)[1] for d in found if d.startswith(name))  # type: ignore[index]
    river = next(re.search(r"the river (\w+)\.", d)[1] for d in found if d.startswith(f"{town} is"))  # type: ignore[index]
    assert sample.answers == (river,)


def test_names_say_that_they_are_synthetic_and_sources_that_it_is_not_the_paper() -> None:
    for hops, words in ((1, "1 hop,"), (2, "2 hops,")):
        task = questions(f"qa_synthetic_{hops}")
        assert task.name == f"qa_synthetic_{hops}" and "invented people" in task.source and words in task.source


def test_nobody_shares_a_name_a_town_or_a_river() -> None:
    for what in ("name", "town", "river"):
        found = [person[what] for person in people(1, 500)]
        assert len(set(found)) == 500
