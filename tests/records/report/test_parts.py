"""Scores of parts of a task, where its record has them."""

from __future__ import annotations

from longreach.records.report.blocks import Table
from longreach.records.report.build import build
from longreach.records.report.parts import parts
from longreach.records.report.rows import groups
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


def test_a_row_a_part_compared_with_dense() -> None:
    content = factory.small()
    right = {"dense": 20, "streaming_llm window=0.1": 12, "oracle_top_k k=0.025": 20}
    vt = content["tasks"]["vt"] = factory.scored(right, of=20)
    for sample in vt["samples"]:  # of the easy ones 4 differ, of the short ones all 8
        sample["facts"] = {"difficulty": "easy" if sample["number"] < 16 else "hard", "length": "short"}
    results = vt["results"]
    for label, score, bounds in (("dense", 0.9, [0.8, 0.95]), ("streaming_llm window=0.1", 0.5, [0.4, 0.6])):
        part = {"score": score, "interval_95": bounds, "samples": 40}
        results[label]["by"] = {"difficulty": {"easy": part}, "length": {"short": part}}
    record = record_of(content)
    (table,) = parts(*groups([record]))
    assert isinstance(table, Table) and table.title == "Parts of vt" and table.head[:2] == ("part", "n")
    row = ["40", "90.0% 80.0-95.0%", "50.0% 40.0-60.0%", "-"]
    assert cells(table) == {"difficulty: easy": row, "length: short": [*row[:2], f"{row[2]} ▼", "-"]}
    assert only(build([record]), Table, "Parts of vt") == table


def test_tasks_without_parts_have_no_table() -> None:
    assert parts(*groups([record_of(factory.small())])) == []
