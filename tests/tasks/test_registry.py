"""Every task: fits its room, fills it, is the same for the same numbers, and its answers stand in its text."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from longreach.errors import InvalidInput, UnknownName
from longreach.tasks.base import Count
from longreach.tasks.registry import GROUPS, RULER, TASKS, choose
from longreach.testing.tiny import tiny_tokenizer

COUNTS: dict[str, Count] = {
    "words": lambda text: len(text.split()),
    "bytes": lambda text: len(tiny_tokenizer()(text, add_special_tokens=False).input_ids),
    "thirds": lambda text: -(-len(text) // 3),
}
ROOM = {"words": 900, "bytes": 9000, "thirds": 3000}


@pytest.mark.parametrize("unit", COUNTS)
@pytest.mark.parametrize("name", TASKS)
def test_a_sample_fills_its_room_and_holds_its_answers(name: str, unit: str) -> None:
    task, count = TASKS[name](), COUNTS[unit]
    for number in range(2):
        sample = task.sample(Random(f"{name}/{number}"), ROOM[unit], count)
        tokens = count(f"{sample.context}\n\n{sample.question} {sample.begun}")
        assert 0.9 * ROOM[unit] <= tokens <= ROOM[unit], tokens
        assert all(answer in sample.context for answer in sample.answers)
        assert task.score(" ".join(sample.answers), sample) == 1.0 or name == "plan"
        assert task.score("nothing of it", sample) == 0.0
        again = task.sample(Random(f"{name}/{number}"), ROOM[unit], count)
        assert again == sample
    other = task.sample(Random("other"), ROOM[unit], count)
    assert other.context != sample.context


@pytest.mark.parametrize("name", TASKS)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match="ask for a longer"):
        TASKS[name]().sample(Random(0), 20, COUNTS["words"])


@pytest.mark.parametrize("length", [512, 2048, 16384])
def test_lengths(length: int) -> None:
    for name in RULER:
        if name == "cwe" and length < 2048:
            continue  # its example and its ten words thirty times each take more
        sample = TASKS[name]().sample(Random(1), length, COUNTS["thirds"])
        whole = f"{sample.context}\n\n{sample.question} {sample.begun}"
        assert 0.85 * length <= COUNTS["thirds"](whole) <= length


def test_samples_are_the_same_in_another_process() -> None:
    code = (
        "from random import Random; from longreach.tasks.registry import choose; import hashlib;"
        "print([hashlib.sha256(t.sample(Random('s'), 9000, len).context.encode()).hexdigest() for t in choose('all')])"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None).stdout
        for _ in range(2)
    }
    assert len(found) == 1 and len(next(iter(found))) > 900


def test_choosing() -> None:
    assert [t.name for t in choose("vt, niah_single_2,vt")] == ["vt", "niah_single_2"]
    assert {t.name for t in choose("all")} == set(GROUPS["all"]) and len(RULER) == 11
    assert [t.name for t in choose("needles")] == [n for n in RULER if n.startswith("niah")]
    with pytest.raises(UnknownName, match="niah_single_1"):
        choose("niah")
    with pytest.raises(InvalidInput, match="no tasks"):
        choose(" , ")
    with pytest.raises(InvalidInput, match=r"qa_1=PATH, or take qa_synthetic_1"):
        choose("qa_1")
