"""Scores of evaluations that sweep a budget option: a panel a task, a curve a method."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from longreach.records.labels import short_label
from longreach.records.report.blocks import Block, Figure
from longreach.records.report.plots import CurvePanel, Series, curves
from longreach.records.report.rows import Group, Row

SHARE = "k"  # a float is a share of the keys; an int is a number of keys, and is not drawn
OPTIONS = {SHARE: "share of the keys (k)", "tables": "hash tables (tables)"}
LEAST = 3  # values that make a curve


def budget_curves(group: Group, file: str) -> list[Block]:
    """A picture for each length and option with methods that differ in this option alone."""
    blocks: list[Block] = []
    for option, axis in OPTIONS.items():
        families = dict(_families(group, option))
        for length in group.lengths if families else ():
            where = f"-{length}" if len(group.lengths) > 1 else ""
            panels = [_panel(group, row, families, option) for row in group.at(length)]
            blocks.append(Figure(f"{file}-score-{option}{where}.png", curves(panels), (
                f"Score of each task by {axis}, {length} tokens; methods of a curve differ in nothing else."
            )))  # fmt: skip
    return blocks


def _families(group: Group, option: str) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """(name, (value, label) of its methods, smallest value first)."""
    found: dict[str, list[tuple[float, str]]] = {}
    for label in group.labels:
        method: dict[str, Any] = group.records[0]["methods"][label]
        value = method["decode"].get(option)
        if value is not None and (option != SHARE or isinstance(value, float)):
            rest = {**method, "decode": {name: x for name, x in method["decode"].items() if name != option}}
            found.setdefault(json.dumps(rest, sort_keys=True), []).append((float(value), label))
    for members in found.values():
        if len(members) >= LEAST:
            yield re.sub(rf" {option}=\S+", "", short_label(members[0][1])), sorted(members)


def _panel(group: Group, row: Row, families: dict[str, list[tuple[float, str]]], option: str) -> CurvePanel:
    """Dense attention is a level line."""
    lines = [
        _line(row, name, n, [value for value, _ in members], [label for _, label in members])
        for n, (name, members) in enumerate(families.items(), 1)
    ]
    if group.dense is not None:
        values = [value for members in families.values() for value, _ in members]
        lines.append(_line(row, "dense", 0, [min(values), max(values)], [group.dense] * 2))
    share = option == SHARE
    title = row.task + (f", {row.record.name}" if len(group.records) > 1 else "")
    return CurvePanel(title, OPTIONS[option], "score", tuple(lines), share=True, shares=share,
                      doubling=not share)  # fmt: skip


def _line(row: Row, name: str, number: int, values: Sequence[float], labels: Sequence[str]) -> Series:
    scores = tuple(row.result(label)["score"] for label in labels)
    return Series(name, number, number == 0, tuple(values), scores, plain=True)
