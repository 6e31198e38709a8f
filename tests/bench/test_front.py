"""README's table of methods, its headline and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.bench import front
from longreach.bench.record import add
from longreach.methods.registry import METHODS, method_class
from longreach.records.record import read, write

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


def test_rows_are_methods_with_pages_and_scores() -> None:
    """Every method but the one that the text below the table names."""
    assert {row.method for row in front.METHODS} | {"oracle_sampling"} == set(METHODS)
    for row in front.METHODS:
        assert row.slots == ", ".join(method_class(row.method).phases)
        assert row.page is None or (ROOT / row.page).is_file()
        assert row.label is None or row.label.split()[0] == row.method
        assert (front.score(RESULTS, row) is None) == (row.label is None)


def test_scores_are_of_the_same_tasks() -> None:
    for name in {row.record for row in front.METHODS}:
        found = read(next(RESULTS.glob(f"{name}.json*")))
        config = found["config"]
        tasks = [task["task"] for task in found["tasks"].values() if task["length"] == front.LENGTH]
        assert len(tasks) == len(set(tasks)) == 11 and found["model"]["name"] == "longreach-mini"
        assert config["samples"] == (50 if "-mac-" in name else 100), "as README states"


def small(folder: Path) -> None:
    """Records of two tasks and of two steps."""

    def result(score: float, reads: float) -> dict[str, Any]:
        return {"score": score, "interval_95": [score - 0.1, score + 0.1], "decode_reads": {"total": reads}}

    rows = {row.method: row for row in front.METHODS}
    labels = {name: rows[name].label for name in ("dense", "loki", "kascade")}
    scores = {"dense": (0.9, 0.7, 1.0), "loki": (0.8, 0.6, 0.25), "kascade": (0.5, 0.4, 0.2)}
    tasks = {
        task: {"length": length, "results": {labels[name]: result(s[n % 2], s[2]) for name, s in scores.items()}}
        for n, (task, length) in enumerate((("one", front.LENGTH), ("two", front.LENGTH), ("three", 4096)))
    }
    methods = {label: {"decode": {"name": name, "plan": None}} for name, label in labels.items()}
    about = {"model": {"name": "longreach-mini"}, "methods": methods}
    for record in {front.SCORES, rows["kascade"].record}:
        write(folder / f"{record}.json", {"kind": "eval", "format": 1, "tasks": tasks, **about})
    times = {"dense": 10000.0, "loki": 6000.0, "mac": 2500.0, "kascade": 4000.0}
    reads = {"loki": 0.226, "mac": 0.021, "kascade": 0.185}
    settings = {name: {"keys_and_values_read": reads[name]} if name in reads else {} for name in times}
    entries = [{"name": n, "microseconds": {"median": time}, "settings": settings[n]} for n, time in times.items()]
    for case in front.SPEEDS:
        add(folder / "steps.json", "steps", case, {"entries": entries, "device": {"name": "abacus"}})


def test_numbers_come_from_the_records(tmp_path: Path) -> None:
    small(tmp_path)
    lines = {line.split("|")[1].strip(): line for line in front.table(tmp_path).splitlines()}
    assert lines["[`loki`](docs/plans.md)"].endswith("| 25% | 70.0% of 80.0% | 23% | 0.60 | 0.60 |")
    assert lines["[`mac`](docs/mac/README.md)"].endswith("| - | - | 2% | 0.25 (forced) | 0.25 (forced) |")
    assert lines["`quest`"].endswith("| - | - | - | - | - |")
    text = front.headline(tmp_path)
    assert "10.0 ms with `dense` (RULER: 80%), 6.0 ms with `loki` (reading 23% of the bytes; RULER at 25%: 70%)" in text
    assert "and 4.0 ms with `kascade` (reading 18% of the bytes; RULER at 20%: 45%, two anchors)" in text
    assert "on one abacus" in text
    drawn = {p.label: p for p in front.drawn(tmp_path)}
    assert set(drawn) == {"dense", "loki", "kascade"} and drawn["dense"].dense and not drawn["loki"].dense
    assert (drawn["loki"].x, drawn["loki"].y) == (0.25, pytest.approx(0.7))
    assert (drawn["loki"].low, drawn["loki"].high) == (pytest.approx(0.6), pytest.approx(0.8))


def test_without_records(tmp_path: Path) -> None:
    assert front.headline(tmp_path) == "No measurements yet." and front.drawn(tmp_path) == []
    assert front.picture(tmp_path) is None
    assert front.table(tmp_path).count("| - | - | - | - |") == len(front.METHODS)


def test_results_are_what_targets_of_records_got(tmp_path: Path) -> None:
    """Each row names a target that a case of its record has, and shows what it got there."""
    assert len(front.measured(RESULTS).splitlines()) == 2 + len(front.RESULTS) and "| - |" not in front.measured(
        RESULTS
    )
    row = front.RESULTS[0]
    targets = [
        {"of": row.of, "quantity": "microseconds", "got": 5.0},
        {"of": row.of, "quantity": row.quantity, "got": 3.0},
    ]
    add(tmp_path / f"{row.record}.json", row.record, row.case, {"targets": targets})
    shown = front.measured(tmp_path).splitlines()[2:]
    assert f"| 3.00 times {row.over} |" in shown[0]
    assert all("| - |" in line for line in shown[1:])
