"""The plan: written in the prompt, and how much of it an answer finished."""

from __future__ import annotations

import re

import pytest
from tests.tasks.counts import made

from longreach.errors import InvalidInput
from longreach.tasks.plan import Plan


def test_the_finish_rate_of_a_plan() -> None:
    task = Plan(5)
    sample = made(task)
    a, b, c, d, e = sample.answers
    assert sample.begun == f"1. {a}"
    assert task.score(f" is x.\n2. {b} y\n3. {c}.\n4. {d}\n5. {e.upper()}", sample) == 1
    assert task.score(f"\n2. {b}\n4. {d}\n5. {e}", sample) == 0.75
    assert task.score(f"\n3. {c}\n2. {b}\n4. {d}", sample) == 0.5  # 2 counts, 3 came before it
    assert task.score(f"\n2. {c}\n12. {b}", sample) == 0
    assert task.score(f"\n2. {b}er", sample) == 0


def test_its_items_stand_in_the_text_in_order_once_and_at_their_depth() -> None:
    for seed in range(4):
        sample = made(Plan(12), seed=seed)
        plan = re.findall(r"(\d+)\. (\w+)\.", sample.context[sample.context.index("This is a plan of 12") :])[:12]
        assert plan == [(str(n), word) for n, word in enumerate(sample.answers, 1)]
        assert len(set(sample.answers)) == 12 and sample.context.count("This is a plan") == 1
        spot = sample.context.index("This is a plan") / len(sample.context)
        assert spot == pytest.approx(sample.facts["depth"], abs=0.06)


def test_answers_have_room_for_every_item() -> None:
    assert Plan(50).max_new_tokens == 2.5 * Plan(20).max_new_tokens > 50 * 20


@pytest.mark.parametrize("items", [0, 1, 10**6])
def test_a_plan_of_one_or_of_more_words_than_there_are(items: int) -> None:
    with pytest.raises(InvalidInput, match=f"plan: expected 2 to \\d+ items, got {items}"):
        Plan(items)
