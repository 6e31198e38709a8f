"""SQuAD's and HotpotQA's files: what they hold is asked, what is wrong with them is said with its place."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.counts import made

from longreach.errors import InvalidInput
from longreach.tasks.registry import choose
from longreach.tasks.ruler.datasets import hotpot, squad

SQUAD = {"version": "2.0", "data": [{"title": str(i), "paragraphs": [{"context": f"Town {i} has {i} wells.", "qas": [
    {"question": f"How many wells has town {i}?", "answers": [{"text": str(i)}] * 2, "is_impossible": False},
    {"question": "Who?", "answers": [], "is_impossible": True}]}]} for i in range(100, 160)]}  # fmt: skip
HOTPOT = [{"question": f"Where is {i}?", "answer": f"a{i}", "supporting_facts": [[f"T{i}", 0], [f"U{i}", 1]],
           "context": [[f"T{i}", ["One. ", "Two."]], [f"U{i}", [f"It is a{i}."]], [f"V{i}", ["None."]]]}
          for i in range(100, 140)]  # fmt: skip


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_their_questions_take_the_place_of_the_synthetic_ones(tmp_path: Path) -> None:
    one, two = write(tmp_path / "squad.json", SQUAD), write(tmp_path / "hotpot.json", HOTPOT)
    tasks = {t.name: t for t in choose(f"all,qa_1={one},qa_2={two}")}
    assert not {"qa_synthetic_1", "qa_synthetic_2"} & set(tasks) and "SQuAD" in tasks["qa_1"].source
    sample = made(tasks["qa_1"], 250)
    town = re.search(r"town (\d+)", sample.question)[1]  # type: ignore[index]
    assert sample.answers == (town,) and f"Town {town} has" in sample.context
    sample = made(tasks["qa_2"], 200)
    asked = re.search(r"Where is (\d+)", sample.question)[1]  # type: ignore[index]
    assert sample.answers == (f"a{asked}",) and f"T{asked}\nOne. Two." in sample.context


def test_what_they_hold(tmp_path: Path) -> None:
    one, two = squad(write(tmp_path / "1", SQUAD)), hotpot(write(tmp_path / "2", HOTPOT))
    assert len(one.items) == len(one.documents) == 60  # those without an answer are left out
    assert len(two.items) == 40 and len(two.documents) == 120 and len(two.items[0].documents) == 2
    pretty = tmp_path / "3"
    pretty.write_text(json.dumps(SQUAD, indent=1))
    assert replace(squad(pretty), source=one.source) == one
    pretty.write_bytes(b"\xef\xbb\xbf" + pretty.read_bytes())
    assert replace(squad(pretty), source=one.source) == one


def without(content: Any, *path: Any) -> Any:
    """A copy that lacks what stands at a path."""
    content = deepcopy(content)
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return content


def put(content: Any, value: Any, *path: Any) -> Any:
    """A copy with a value at a path."""
    content = deepcopy(content)
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return content


QUESTION = ("data", 2, "paragraphs", 0, "qas", 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("qa_1", '{\n"data": [\n{"a" 1}]}', "file.json, line 3: no valid JSON"),
        ("qa_1", {"data": []}, "holds no question"),
        ("qa_1", [1], r"file.json: expected an object, got \[1\]"),
        ("qa_1", {}, "file.json: the field 'data' is missing"),
        ("qa_1", without(SQUAD, "data", 4, "paragraphs"), "file.json, article 5: the field 'paragraphs' is missing"),
        ("qa_1", without(SQUAD, "data", 4, "paragraphs", 0, "context"), "article 5, paragraph 1: .* 'context' is miss"),
        ("qa_1", without(SQUAD, *QUESTION, "answers"), "article 3, paragraph 1, question 2: .* 'answers' is missing"),
        (
            "qa_1",
            put(SQUAD, [{"start": 1}], *QUESTION, "answers"),
            "article 3, .* question 2: the field 'text' is miss",
        ),
        ("qa_1", put(SQUAD, 7, *QUESTION), "article 3, paragraph 1, question 2: expected an object, got 7"),
        ("qa_1", put(SQUAD, 7, "data", 0, "paragraphs", 0, "qas", 0, "question"), "'question' should be a text, got 7"),
        ("qa_2", without(HOTPOT, 6, "supporting_facts"), "file.json, entry 7: the field 'supporting_facts' is missing"),
        ("qa_2", put(HOTPOT, None, 3, "answer"), "entry 4: the field 'answer' should be a text, got null"),
        ("qa_2", put(HOTPOT, ["T", "text"], 3, "context", 0), "entry 4: the field 'context' should list"),
        ("qa_2", put(HOTPOT, ["T", [1]], 3, "context", 0), "entry 4: the field 'context' should list"),
        ("qa_2", put(HOTPOT, "T", 3, "supporting_facts", 0), "entry 4: the field 'supporting_facts' should list"),
        ("qa_2", {"data": []}, "file.json: expected a list of questions"),
        ("qa_2", None, "cannot read .*file.json"),
    ],
)
def test_broken_data_sets(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        write(path, content)
    with pytest.raises(InvalidInput, match=message):
        choose(f"{name}={path}")


def test_what_is_no_text_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="is not UTF-8"):
        choose(f"qa_1={path}")
