"""Questions about documents: all the item's own are there, and others to distract."""

from __future__ import annotations

import re

import pytest
from tests.tasks.counts import made

from longreach.errors import InvalidInput
from longreach.tasks.base import Sample
from longreach.tasks.ruler.questions import Item, Questions

TEXTS = tuple(f"Town {n} has {n} wells, and nobody knows why." for n in range(100, 200))
ITEM = Item("How many wells has town 150?", ("150 wells",), (TEXTS[50], "It is in the south."))


def documents(sample: Sample) -> list[str]:
    return re.split(r"\n\nDocument \d+:\n", sample.context)[1:]


def test_the_items_own_documents_are_always_there_and_none_twice() -> None:
    task = Questions("x", (ITEM,), TEXTS)
    for room in (90, 200, 700):
        found = documents(made(task, room))
        assert set(ITEM.documents) <= set(found) and len(set(found)) == len(found)
    sample = made(task, 700)
    own = [place for place, d in enumerate(documents(sample)) if d in ITEM.documents]
    assert sample.facts["depths"] == [place / sample.facts["documents"] for place in own] and len(own) == 2
    numbers = re.findall(r"\n\nDocument (\d+):\n", sample.context)
    assert numbers == [str(n) for n in range(1, sample.facts["documents"] + 1)]


def test_no_item_is_asked_again_before_all_were() -> None:
    items = tuple(Item(f"{n}?", (f"{n}",), (TEXTS[n],)) for n in range(7))
    task = Questions("x", items, TEXTS)

    def asked(seed: int) -> list[str]:
        samples = [made(task.at(n, 14, seed), 300, seed=n) for n in range(14)]
        assert all(items[s.facts["item"]].answers == s.answers for s in samples)
        return [s.answers[0] for s in samples]

    once = asked(0)
    assert set(once[:7]) == {f"{n}" for n in range(7)} and once[7:] == once[:7]
    assert asked(0) == once != asked(1)  # which come first is the seed's affair


def test_only_a_sole_answer_is_kept_from_the_others() -> None:
    texts = (*TEXTS, *(f"Somebody counted 150 Wells {n} times." for n in range(200)))
    for sole in (False, True):
        found = documents(made(Questions("x", (ITEM,), texts, sole=sole), 500))
        assert (sum("150 wells" in d.lower() for d in found) == 1) == sole


def test_too_few_documents_for_a_long_text() -> None:
    with pytest.raises(InvalidInput, match=r"^x fills at most .* shorter --length"):
        made(Questions("x", (ITEM,), TEXTS), 5000)


def test_any_of_the_answers_will_do() -> None:
    task = Questions("x", (Item("?", ("one", "two"), ("d",)),), TEXTS)
    sample = made(task, 500)
    assert task.score(" TWO.", sample) == 1 and task.score("three", sample) == 0
