"""LongBench v2: four choices, one letter."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.tasks.longbench.files import entry_v2, write_lines

from longreach.errors import InvalidInput
from longreach.tasks import longbench
from longreach.tasks.longbench.v2 import chosen


@pytest.mark.parametrize("indent", [None, 1])
def test_lists_and_lines_are_read_alike(tmp_path: Path, indent: int | None) -> None:
    entries = [entry_v2(), entry_v2(_id="2", answer="A", length="long")]
    (tmp_path / "data.json").write_text(json.dumps(entries, indent=indent))
    write_lines(tmp_path / "data.jsonl", *entries)
    (listed,), (lined,) = (longbench.tasks(tmp_path / name, 2) for name in ("data.json", "data.jsonl"))
    assert listed.fixed == lined.fixed
    sha256 = hashlib.sha256((tmp_path / "data.json").read_bytes()).hexdigest()
    assert listed.source.endswith(f"; sha256 {sha256[:16]}, data.json")  # a record says which file it was
    first, second = listed.fixed
    assert listed.name == "longbench_v2" and "2412.15204" in listed.source
    assert first.facts == {
        "id": "66e",
        "domain": "Code Repository Understanding",
        "sub_domain": "Code repo QA",
        "difficulty": "hard",
        "length": "short",
    }
    assert "A text with {braces}." in first.context
    assert "Which {one}?\nChoices:\n(A) first\n(B) second\n(C) third\n(D) fourth" in first.question
    assert listed.by == ("difficulty", "length")  # as the official results are told apart
    assert (first.answers, second.answers) == (("C",), ("A",))
    assert [listed.score("The correct answer is (C).", s) for s in listed.fixed] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (A)", "A"),
        ("So: **The correct answer is (B)**, as shown.", "B"),
        ("The correct answer is D.", "D"),
        ("The correct answer is C. No: The correct answer is (A)", "A"),
        ("The correct answer is (E)", None),
        ("(A)", None),
        ("the correct answer is (A)", None),
        ("", None),
    ],
)
def test_the_letter_is_taken_from_the_form_asked_for(answer: str, letter: str | None) -> None:
    assert chosen(answer) == letter


@pytest.mark.parametrize("field", sorted(entry_v2()))
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    broken = {k: v for k, v in entry_v2().items() if k != field}
    with pytest.raises(InvalidInput, match=rf"data\.jsonl, line 2: the field '{field}' is missing"):
        longbench.tasks(write_lines(tmp_path / "data.jsonl", entry_v2(), broken), 2)
    (tmp_path / "data.json").write_text(json.dumps([entry_v2(), broken]))
    with pytest.raises(InvalidInput, match=rf"data\.json, entry 2: the field '{field}' is missing"):
        longbench.tasks(tmp_path / "data.json", 2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[\n{"_id": "1"},\n{"_id": }\n]', "line 3: no valid JSON"),
        (json.dumps([entry_v2(answer="E")]), "entry 1: the field 'answer' should be A, B, C or D, got 'E'"),
        (json.dumps([entry_v2(answer="AB")]), "entry 1: the field 'answer' should be A, B, C or D"),
        (json.dumps([entry_v2(answer="")]), "entry 1: the field 'answer' should be A, B, C or D"),
        (json.dumps([entry_v2(choice_A=1)]), "entry 1: the field 'choice_A' should be a text, got 1"),
        (json.dumps([entry_v2(), 3]), "entry 2: expected a JSON object"),
    ],
)
def test_bad_entries_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        longbench.tasks(write_lines(tmp_path / "data.json", text), 2)


@pytest.mark.parametrize("text", ["", "[]", " [ ]\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"data\.json is empty"):
        longbench.tasks(write_lines(tmp_path / "data.json", text), 2)
