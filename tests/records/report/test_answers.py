"""Failed and wrong answers are there to be looked at."""

from __future__ import annotations

from typing import Any

from longreach.records.report.answers import failures, wrong
from longreach.records.report.blocks import Table, Text
from longreach.records.report.rows import Group, groups
from tests.records.report import factory
from tests.records.report.factory import answer, evaluation, only, record_of, result, task

LABEL = "streaming_llm window=0.1"
METHODS = {k: factory.METHODS[k] for k in ("dense", LABEL)}


def group_of(answers: list[dict[str, Any]]) -> Group:
    right = [answer(n, 1.0) for n in range(len(answers))]
    made = task({"dense": result("dense", right), LABEL: result(LABEL, answers)})
    return groups([record_of(evaluation({"vt": made}, methods=METHODS))])[0]


def test_errors_are_listed_with_where_they_happened() -> None:
    found = failures([group_of([answer(0, 1.0), answer(1, 0.0, error="RuntimeError: no room")])])
    assert only(found, Text).text.startswith("1 answers failed") and only(found, Text).loud
    (row,) = only(found, Table).rows
    assert [c.text for c in row] == ["record.json", "vt", "4096", LABEL, "1", "RuntimeError: no room"]


def test_many_errors_are_cut_and_counted() -> None:
    found = failures([group_of([answer(n, 0.0, error="E" * 1000) for n in range(60)])])
    table = only(found, Table)
    assert len(table.rows) == 50 and "60 answers failed" in only(found, Text, "60").text
    assert all(len(row[-1].text) < 340 and "(1000 characters)" in row[-1].text for row in table.rows)
    assert only(found, Text, "The first 50")


def test_no_error_is_said_too() -> None:
    assert [b.text for b in failures([group_of([answer(0, 0.0)])]) if isinstance(b, Text)] == [
        "No sample failed with an error."
    ]


def test_the_worst_answers_come_first_with_what_was_expected() -> None:
    said = [answer(0, 1.0), answer(1, 0.5, "half"), answer(2, 0.0, "x" * 500), answer(3, 0.0, "none"),
            answer(4, 0.75), answer(5, 0.0, error="E: failed")]  # fmt: skip
    said[3]["text"] = ""
    (table,) = wrong(group_of(said))
    assert isinstance(table, Table) and table.folded and "4 answers without the full score" in table.title
    rows = [[c.text for c in row] for row in table.rows]
    assert [r[:5] for r in rows] == [
        [f"2 {LABEL}", "4 of 6", "2", "0.0%", "right 2"],
        [f"2 {LABEL}", "4 of 6", "3", "0.0%", "right 3"],
        [f"2 {LABEL}", "4 of 6", "1", "50.0%", "right 1"],
    ]
    assert rows[0][5].startswith("x" * 240 + " ...") and len(rows[0][5]) < 300
    assert rows[1][5] == "(nothing)" and rows[2][5] == "half"


def test_right_answers_are_not_shown() -> None:
    assert list(wrong(group_of([answer(0, 1.0)]))) == []
