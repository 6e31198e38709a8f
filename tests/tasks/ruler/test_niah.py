"""Needles: as many as the task says, of their kinds, at their depths, and nothing else holds the answer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tasks.counts import made

from longreach.errors import InvalidInput
from longreach.tasks.needle import ASKED, NEEDLE
from longreach.tasks.ruler.niah import MULTI, SINGLE, Niah, niah
from longreach.tasks.ruler.text import NOISE
from longreach.tasks.words import ADJECTIVES, NOUNS, evaluation_words
from longreach.train.mini.keys import KeySource

FORM = re.compile(r"One of the special magic (\w+)s for (.+?) is: (.+?)\.(?=\s|$)")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
KINDS = {"number": r"[1-9]\d{6}", "uuid": UUID, "word": r"[a-z]+-[a-z]+"}


@pytest.mark.parametrize("task", [*SINGLE, *MULTI], ids=lambda t: t.name)
@pytest.mark.parametrize("seed", range(3))
def test_needles(task: Niah, seed: int) -> None:
    sample = made(task, seed=seed)
    found = FORM.findall(sample.context)
    needles = {(key, value) for _, key, value in found}
    keys = sample.facts["keys"]
    assert {attribute for attribute, _, _ in found} == {task.value}
    assert len(keys) == task.queries and all(key in sample.question and key in sample.begun for key in keys)
    assert {value for key, value in needles if key in keys} == set(sample.answers)
    assert len(set(sample.answers)) == len(sample.answers) == task.queries * task.values
    assert all(sample.context.count(answer) == 1 for answer in sample.answers)
    assert not any(answer in sample.question + sample.begun for answer in sample.answers)
    assert all(re.fullmatch(KINDS[task.key], key) and re.fullmatch(KINDS[task.value], v) for key, v in needles)
    if task.haystack == "needles":
        assert len(found) > 100 and len({key for key, _ in needles}) == len(found)
    else:
        assert len(found) == task.keys * task.values
    assert (NOISE in sample.context) == (task.haystack == "noise")
    for key, depth in zip([k for k in keys for _ in range(task.values)], sample.facts["depths"], strict=True):
        values = [v for k, v in needles if k == key and v in sample.answers]
        spots = [sample.context.index(NEEDLE.format(attribute=task.value, key=key, value=v)) for v in values]
        assert min(abs(spot / len(sample.context) - depth) for spot in spots) < 0.05


def test_the_published_table() -> None:
    rows = {t.name: (t.haystack, t.key, t.value, t.keys, t.values, t.queries) for t in (*SINGLE, *MULTI)}
    assert rows == {
        "niah_single_1": ("noise", "word", "number", 1, 1, 1),
        "niah_single_2": ("essay", "word", "number", 1, 1, 1),
        "niah_single_3": ("essay", "word", "uuid", 1, 1, 1),
        "niah_multikey_1": ("essay", "word", "number", 4, 1, 1),
        "niah_multikey_2": ("needles", "word", "number", 1, 1, 1),
        "niah_multikey_3": ("needles", "uuid", "uuid", 1, 1, 1),
        "niah_multivalue": ("essay", "word", "number", 1, 4, 1),
        "niah_multiquery": ("essay", "word", "number", 4, 1, 4),
    }


def test_one_answer_is_asked_for_as_in_training_and_several_in_the_plural() -> None:
    single = made(SINGLE[1])
    assert single.question == ASKED.format(attribute="number", key=single.facts["keys"][0])
    assert single.context.startswith("A special magic number is hidden")
    values, queries = made(niah("niah_multivalue")), made(niah("niah_multiquery"))
    for sample in (values, queries):
        assert sample.context.startswith("Some special magic numbers are hidden")
        assert sample.question.startswith("What are all the special magic numbers for ")
        assert sample.begun.endswith("mentioned in the provided text are")
    a, b, c, d = queries.facts["keys"]
    assert f"for {a}, {b}, {c}, and {d} mentioned" in queries.question


def test_no_key_of_words_was_ever_trained_on() -> None:
    training, reserved = KeySource(), evaluation_words()
    trained = {*training.adjectives, *training.nouns}
    for task in (niah("niah_multikey_1"), niah("niah_multikey_2")):
        keys = [key.split("-") for _, key, _ in FORM.findall(made(task).context)]
        assert all(noun in reserved and noun not in trained for _, noun in keys)
        assert all(adjective not in training.adjectives for adjective, _ in keys)


@pytest.mark.parametrize("values", [1, 3])
def test_other_needles_never_repeat_a_key_or_hold_the_answer(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    few = ADJECTIVES[:20], NOUNS[:20]  # 400 keys and 50 values for some 60 needles
    monkeypatch.setattr("longreach.tasks.needle._halves", lambda: few)
    monkeypatch.setattr("longreach.tasks.ruler.niah.digits", lambda random, count: str(random.randrange(50)))
    for seed in range(30):
        sample = made(Niah("x", "needles", values=values), 800, seed)
        found = [(key, value) for _, key, value in FORM.findall(sample.context)]
        assert len(found) > 40 and len(set(sample.answers)) == values
        assert sum(value in sample.answers for _, value in found) == values
        assert sum(key in sample.facts["keys"] for key, _ in found) == values


def test_a_haystack_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "essay.txt"
    path.write_text("\n\n".join(f"A camel went by. It was camel number {n}." for n in range(300)))
    task = niah("niah_multikey_1", path)
    sample = made(task, 1500)
    assert task.source.endswith("haystack essay.txt") and task == replace(niah("niah_multikey_1"), essay=path)
    assert len(FORM.findall(sample.context)) == 4 and sample.context.count("A camel") > 100
    with pytest.raises(InvalidInput, match=r"cannot read .*nowhere"):
        made(niah("niah_single_2", tmp_path / "nowhere"))
