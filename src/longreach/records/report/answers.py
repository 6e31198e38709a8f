"""Failed and low-scoring answers in full text, to check what a score means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longreach.records.report.blocks import Block, Table, Text, table
from longreach.records.report.format import cropped, percent
from longreach.records.report.rows import Group, Row
from longreach.records.report.scores import numbered

ERRORS = 50
A_METHOD = 3
EXPECTED, SAID, ERROR = 120, 240, 300  # characters


def failures(groups: Sequence[Group]) -> list[Block]:
    """Samples whose answer failed with an error."""
    found = [
        [row.record.name, row.task, str(row.length), label, str(a["number"]), cropped(a["error"], ERROR)]
        for group in groups for row in group.rows for label in group.labels
        for a in row.result(label)["answers"] if a["error"] is not None
    ]  # fmt: skip
    if not found:
        return [Text("No sample failed with an error.")]
    blocks: list[Block] = [
        Text(f"{len(found)} answers failed with an error; each counts as wrong, none is left out.", loud=True),
        table("Failed samples", ("record", "task", "length", "method", "sample", "error"), found[:ERRORS], texts=6),
    ]
    if len(found) > ERRORS:
        blocks.append(Text(f"The first {ERRORS} are shown; the records hold all."))
    return blocks


def wrong(group: Group) -> Iterator[Block]:
    """For each task the lowest scores of each method, without those that failed with an error."""
    for row in group.rows:
        lines, count = [], 0
        for name, label in zip(numbered(group.labels), group.labels, strict=True):
            bad = _wrong(row, label)
            count += len(bad)
            lines += [_line(row, name, label, a, len(bad)) for a in bad[:A_METHOD]]
        if lines:
            yield _table(group, row, lines, count)


def _wrong(row: Row, label: str) -> list[dict[str, Any]]:
    bad = [a for a in row.result(label)["answers"] if a["score"] < 1 and a["error"] is None]
    return sorted(bad, key=lambda a: (a["score"], a["number"], a["draw"]))


def _line(row: Row, name: str, label: str, answer: dict[str, Any], bad: int) -> list[str]:
    sample = next(s for s in row.entry["samples"] if s["number"] == answer["number"])
    total = len(row.result(label)["answers"])
    expected = cropped(", ".join(sample["expected"]), EXPECTED)
    said = cropped(answer["text"], SAID) if answer["text"] else "(nothing)"
    return [name, f"{bad} of {total}", str(answer["number"]), percent(answer["score"]), expected, said]


def _table(group: Group, row: Row, lines: list[list[str]], count: int) -> Table:
    where = f", {row.length} tokens" if len(group.lengths) > 1 else ""
    where += f", {row.record.name}" if len(group.records) > 1 else ""
    head = ("method", "not full score", "sample", "score", "expected", "said")
    return table(f"{row.task}{where}: {count} answers without the full score", head, lines, texts=6, folded=True)
