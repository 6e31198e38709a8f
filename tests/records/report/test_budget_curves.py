"""Sweeps of a budget option: which methods are a curve, and what is drawn of them."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report import budget_curves as module
from longreach.records.report.budget_curves import budget_curves
from longreach.records.report.rows import Group, groups
from tests.records.report.factory import evaluation, record_of, scored

DENSE = {"prefill": {"name": "dense"}, "decode": {"name": "dense"}}


def group(decodes: dict[str, dict[str, Any]], rights: dict[str, tuple[int, ...]], *lengths: int) -> Group:
    """decodes: label -> decode method. rights: task -> answers right of 20 by method, dense attention's first."""
    methods = {"dense": DENSE} | {label: {"prefill": DENSE["prefill"], "decode": x} for label, x in decodes.items()}
    tasks = {task: scored(dict(zip(methods, counts, strict=True)), of=20) for task, counts in rights.items()}
    contents = [record_of(evaluation(tasks, length, methods=methods), f"r{length}") for length in lengths or (4096,)]
    (made,) = groups(contents)
    return made


def top(k: float, **more: Any) -> tuple[str, dict[str, Any]]:
    label = f"oracle_top_k k={k}" + "".join(f" {name}={x}" for name, x in more.items())
    return label, {"name": "oracle_top_k", "k": k, "choose": "top", **more}


def pig(tables: int | None, **more: Any) -> tuple[str, dict[str, Any]]:
    label = f"magicpig tables={tables}" + "".join(f" {name}={x}" for name, x in more.items())
    return label, {"name": "magicpig", "tables": tables, "centre": 1024, **more}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(module, "curves", lambda panels: calls.append(panels) or b"png")
    return calls


def test_a_panel_a_task_and_a_curve_a_family(drawn: list[Any]) -> None:
    methods = [top(0.1), top(0.01), top(0.05), *(top(k, choose="sample") for k in (0.05, 0.1, 0.2)), top(0.02, x=1)]
    made = group(dict(methods), {"vt": (20, 18, 2, 10, 19, 20, 20, 0), "cwe": (16, *range(7))})
    (figure,) = budget_curves(made, "eval")
    assert figure.file == "eval-score-k.png" and "4096 tokens" in figure.caption
    ((vt, cwe),) = drawn
    assert (vt.title, cwe.title) == ("vt", "cwe") and vt.shares and not vt.doubling
    assert [(s.label, s.x, s.y, s.dense) for s in vt.series] == [
        ("oracle_top_k", (0.01, 0.05, 0.1), (0.1, 0.5, 0.9), False),
        ("oracle_top_k choose=sample", (0.05, 0.1, 0.2), (0.95, 1.0, 1.0), False),
        ("dense", (0.01, 0.2), (1.0, 1.0), True),
    ]
    assert [s.number for s in vt.series] == [1, 2, 0] and cwe.series[-1].y == (0.8, 0.8)


def test_tables_and_lengths(drawn: list[Any]) -> None:
    methods = dict(map(pig, (300, 25, 75, None)))
    found = budget_curves(group(methods, {"vt": (20, 20, 10, 15, 1)}, 4096, 1024), "e")
    assert [block.file for block in found] == ["e-score-tables-1024.png", "e-score-tables-4096.png"]
    ((panel,), _) = drawn
    assert panel.series[0].label == "magicpig" and panel.doubling and not panel.shares
    assert panel.series[0].x == (25, 75, 300) and panel.series[0].y == (0.5, 0.75, 1.0)


def test_few_values_and_numbers_of_keys_draw_nothing(drawn: list[Any]) -> None:
    methods = [top(0.1), top(0.2), top(64), top(128), pig(25), pig(75), pig(150, centre=0)]
    assert budget_curves(group(dict(methods), {"vt": (20, *range(7))}), "e") == [] == drawn
