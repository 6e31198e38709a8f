"""The structure of RULER's tasks, asked of the text that models see."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.tasks.base import Sample, Task, all_of, any_of
from longreach.tasks.needle import NEEDLE
from longreach.tasks.plan import Plan
from longreach.tasks.registry import TASKS, choose
from longreach.tasks.ruler.frequent_words import DOTS
from longreach.tasks.ruler.niah import MULTI, SINGLE, Niah
from longreach.tasks.ruler.text import NOISE, enumeration, hidden
from longreach.tasks.sizing import largest
from longreach.tasks.sweep import Sweep

FORM = re.compile(r"One of the special magic (\w+)s for (.+?) is: (.+?)\.(?=\s|$)")


def words(text: str) -> int:
    return len(text.split())


def made(task: Task, room: int = 3000, seed: int = 0) -> Sample:
    return task.sample(Random(seed), room, words)


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
    assert len(sample.answers) == task.queries * task.values
    if task.haystack == "needles":
        assert len(found) > 100 and len({key for key, _ in needles}) == len(found)
    else:
        assert len(found) == task.keys * task.values
    assert (NOISE in sample.context) == (task.haystack == "noise")
    for key, depth in zip([k for k in keys for _ in range(task.values)], sample.facts["depths"], strict=True):
        values = [v for k, v in needles if k == key and v in sample.answers]
        spots = [sample.context.index(NEEDLE.format(attribute=task.value, key=key, value=v)) for v in values]
        assert min(abs(spot / len(sample.context) - depth) for spot in spots) < 0.05


def test_values_are_of_their_kind() -> None:
    assert all(re.fullmatch(r"\d{7}", a) for a in made(SINGLE[0]).answers)
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert all(re.fullmatch(uuid, a) for a in (*made(SINGLE[2]).answers, *made(MULTI[2]).facts["keys"]))


def test_a_chain_is_hidden_in_order_and_leads_to_every_name() -> None:
    sample = made(TASKS["vt"]())
    example, own = sample.context.split("Memorize and track")[1:]
    value = re.search(r"value (\d{5})", sample.question)[1]  # type: ignore[index]
    held: dict[str, str] = {}
    for name, of in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", own):
        held[name] = held.get(of, of)
    assert set(held) == set(sample.answers) and set(held.values()) == {value} and len(held) == 5
    assert value not in example and all(name not in example for name in sample.answers)
    assert all(name in example.split("they are:")[1] for name in re.findall(r"VAR (\w{5}) =", example))
    assert "5 variables" in sample.begun


def test_common_words_are_ten_times_as_common() -> None:
    sample = made(TASKS["cwe"](), 4000)
    example, own = sample.context.split("Below is a numbered list")[1:]
    times = Counter(re.findall(r"\d+\. (\w+)", own))
    assert {w for w, n in times.items() if n == 30} == set(sample.answers) and len(sample.answers) == 10
    assert set(times.values()) == {30, 3} and not set(times) & set(re.findall(r"\d+\. (\w+)", example))


def test_frequent_words_follow_the_law() -> None:
    sample = made(TASKS["fwe"](), 4000)
    times = Counter(sample.context.split("coded words.\n")[1].split())
    ranked = [word for word, _ in times.most_common(5)]
    assert ranked[0] == DOTS and tuple(ranked[1:4]) == sample.answers and times[ranked[3]] > times[ranked[4]]
    assert times[ranked[1]] == pytest.approx(times[DOTS] / 4, abs=1)


def test_documents_and_their_places() -> None:
    for hops in (1, 2):
        sample = made(TASKS[f"qa_synthetic_{hops}"]())
        documents = re.split(r"\n\nDocument \d+:\n", sample.context)[1:]
        assert len(documents) == sample.facts["documents"] and len(sample.facts["depths"]) == hops
        answer, places = sample.answers[0], [round(d * len(documents)) for d in sample.facts["depths"]]
        holding = [i for i, d in enumerate(documents) if answer in d]
        assert set(holding) <= set(places) and holding
    assert made(TASKS["qa_synthetic_1"]()).question.endswith("live?")


def test_the_sweep_goes_through_depths_in_order() -> None:
    task = Sweep()
    depths = [task.at(n, 5).depth for n in range(5)]
    assert depths == [0, 0.25, 0.5, 0.75, 1] and task.at(0, 1).depth == 0.5
    for n in range(5):
        sample = made(task.at(n, 5), seed=n)
        spot = sample.context.index(sample.answers[0]) / len(sample.context)
        assert spot == pytest.approx(depths[n], abs=0.05) and sample.facts["depth"] == depths[n]


def test_the_finish_rate_of_a_plan() -> None:
    task = Plan(5)
    sample = made(task)
    a, b, c, d, e = sample.answers
    assert sample.begun == f"1. {a}"
    assert task.score(f" is x.\n2. {b} y\n3. {c}.\n4. {d}\n5. {e.upper()}", sample) == 1
    assert task.score(f"\n2. {b}\n4. {d}\n5. {e}", sample) == 0.75
    assert task.score(f"\n3. {c}\n2. {b}\n4. {d}", sample) == 0.5  # 2 counts, 3 came before it
    assert task.score(f"\n2. {c}\n12. {b}", sample) == 0


def test_matching() -> None:
    assert all_of("It is ABC and 12.", ("abc", "12", "34", "x")) == 0.5
    assert any_of("It is ABC.", ("zz", "abc")) == 1 and any_of("", ("a",)) == 0
    assert enumeration(["a"]) == "a" and enumeration(["a", "b"]) == "a and b"
    assert enumeration(["a", "b", "c"]) == "a, b, and c"
    assert hidden(["0", "1"], [(1.0, "z"), (0.0, "a"), (0.5, "m"), (0.5, "n")]) == ["a", "0", "m", "n", "1", "z"]


def test_sizes_are_found_with_few_counts() -> None:
    for slope, room in [(1, 10), (3, 1000), (7, 100_000), (0.4, 5000)]:
        asked: list[int] = []

        def tokens(size: int, slope: float = slope, room: int = room, asked: list[int] = asked) -> int:
            asked.append(size)
            return 50 + round(slope * size) if room > 50 else size

        size = largest(tokens, room, "x")
        assert 0.98 * room <= tokens(size) <= room and len(asked) < 12
    with pytest.raises(InvalidInput, match="x fills at most 20 of 100"):
        largest(lambda n: n, 100, "x", most=20)
    assert largest(lambda n: n, 21, "x", most=20) == 20


SQUAD = {"data": [{"paragraphs": [{"context": f"Town {i} has {i} wells.", "qas": [
    {"question": f"How many wells has town {i}?", "answers": [{"text": str(i)}] * 2, "is_impossible": False},
    {"question": "Who?", "answers": [], "is_impossible": True}]}]} for i in range(100, 160)]}  # fmt: skip
HOTPOT = [{"question": f"Where is {i}?", "answer": f"a{i}", "supporting_facts": [[f"T{i}", 0], [f"U{i}", 1]],
           "context": [[f"T{i}", ["One. ", "Two."]], [f"U{i}", [f"It is a{i}."]], [f"V{i}", ["None."]]]}
          for i in range(100, 140)]  # fmt: skip


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_data_sets(tmp_path: Path) -> None:
    one, two = write(tmp_path / "squad.json", SQUAD), write(tmp_path / "hotpot.json", HOTPOT)
    tasks = {t.name: t for t in choose(f"all,qa_1={one},qa_2={two}")}
    assert "qa_synthetic_1" not in tasks and "SQuAD" in tasks["qa_1"].source
    sample = made(tasks["qa_1"], 250)
    town = re.search(r"town (\d+)", sample.question)[1]  # type: ignore[index]
    assert sample.answers == (town,) and f"Town {town} has" in sample.context
    sample = made(tasks["qa_2"], 200)
    asked = re.search(r"Where is (\d+)", sample.question)[1]  # type: ignore[index]
    assert sample.answers == (f"a{asked}",) and f"T{asked}\nOne. Two." in sample.context


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("qa_1", "{", "is no JSON"),
        ("qa_1", {"data": [{"paragraphs": [{"qas": []}]}]}, "lacks the field 'context'"),
        ("qa_1", {"data": []}, "holds no question"),
        ("qa_1", [1], "not built like"),
        ("qa_2", [{"question": "?", "context": []}], "lacks the field 'supporting_facts'"),
        ("qa_2", None, "cannot read"),
    ],
)
def test_broken_data_sets(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        write(path, content)
    with pytest.raises(InvalidInput, match=message):
        choose(f"{name}={path}")
