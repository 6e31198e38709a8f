"""Scores of parts of a task, by facts of its samples: LongBench v2 by difficulty and by length."""

from __future__ import annotations

from longreach.records.report.blocks import Block, Cell, table
from longreach.records.report.format import interval, percent
from longreach.records.report.rows import Group, Row
from longreach.records.report.scores import numbered


def parts(group: Group) -> list[Block]:
    """A table for each task with parts, one row for each part."""
    return [_table(group, row) for row in group.rows if any(row.result(label).get("by") for label in group.labels)]


def _table(group: Group, row: Row) -> Block:
    by = {label: row.result(label).get("by", {}) for label in group.labels}
    places = dict.fromkeys((fact, value) for facts in by.values() for fact, found in facts.items() for value in found)
    rows: list[list[str | Cell]] = []
    for fact, value in places:
        found = {label: by[label].get(fact, {}).get(value) for label in group.labels}
        samples = max(part["samples"] for part in found.values() if part)
        inside = {s["number"] for s in row.entry["samples"] if str(s["facts"].get(fact)) == value}
        cells = [Cell("-") if part is None else Cell(
            percent(part["score"]), interval(part["interval_95"]), row.mark(label, group.dense, inside),
        ) for label, part in found.items()]  # fmt: skip
        rows.append([f"{fact}: {value}", str(samples), *cells])
    where = f", {row.length} tokens" if len(group.lengths) > 1 else ""
    where += f", {row.record.name}" if len(group.records) > 1 else ""
    return table(f"Parts of {row.task}{where}", ["part", "n", *numbered(group.labels)], rows)
