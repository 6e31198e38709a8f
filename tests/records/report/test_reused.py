"""Sweeps of MAC's options: what is a curve, what is a grid, and what the numbers in it are."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report import reused as module
from longreach.records.report.reused import reused
from longreach.records.report.rows import Group, groups
from tests.records.report.factory import answer, evaluation, reads, record_of, result, task

DENSE = {"prefill": {"name": "dense"}, "decode": {"name": "dense"}}


def group(found: dict[str, tuple[dict[str, Any], int, float]]) -> Group:
    """found: label -> (MAC's options, answers right of 20, bytes read)."""
    methods = {"dense": DENSE} | {
        label: {"prefill": {"name": "dense"}, "decode": {"name": "mac", "window": 1024, "band": 256, "tau": 0.45} | how}
        for label, (how, _, _) in found.items()
    }
    results = {"dense": result("dense", [answer(n, 1.0) for n in range(20)])}
    for label, (_, right, read) in found.items():
        answers = [answer(n, float(n < right)) for n in range(20)]
        results[label] = result(label, answers, decode_reads=reads(read))
    (made,) = groups([record_of(evaluation({"one": task(results)}, methods=methods), "a")])
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    for name in ("maps", "curves"):
        monkeypatch.setattr(module, name, lambda *a: calls.append(a) or b"png")
    return calls


def test_a_curve_of_methods_that_differ_in_tau_alone(drawn: list[Any]) -> None:
    found = group({
        "a": ({"tau": 0.9}, 20, 0.8), "b": ({"tau": 0.3}, 10, 0.4), "c": ({"tau": 0.6}, 19, 0.6),
        "d": ({"tau": 0.7, "depth": 4}, 1, 0.1), "e": ({"tau": None}, 3, 0.2),
    })  # fmt: skip
    (figure,) = reused(found, "eval")
    (((score, keys),),) = drawn
    assert figure.file == "eval-mac-tau.png" and len(score.series) == len(keys.series) == 1
    assert score.series[0].x == (0.3, 0.6, 0.9) and score.series[0].y == pytest.approx((0.5, 0.95, 1.0))
    assert keys.series[0].y == pytest.approx((0.4, 0.6, 0.8)) and score.series[0].label == "window 1024, band 256"


def test_a_grid_of_bands_and_windows(drawn: list[Any]) -> None:
    found = group({
        "a": ({"window": 64, "band": 8}, 20, 0.8), "b": ({"window": 128, "band": 8}, 18, 0.2),
        "c": ({"window": 64, "band": 16}, 19, 1.0), "d": ({"window": 256, "band": 16}, 19, 0.5),
    })  # fmt: skip
    (figure,) = reused(found, "eval")
    (((panel,), xlabel, ylabel, _),) = drawn
    assert figure.file == "eval-mac-grid-1.png" and (xlabel, ylabel) == ("window", "band")
    assert panel.rows == ("8", "16") and panel.columns == ("64", "128", "256")
    best = 0.9 / 0.2
    assert [list(row) for row in panel.values] == [
        [pytest.approx(1 / 0.8 / best), 1.0, None], [pytest.approx(0.95 / best), None, pytest.approx(0.95 / 0.5 / best)]
    ]  # fmt: skip
    assert panel.stars == ((True, False, False), (True, False, True))


def test_what_is_no_sweep_draws_nothing(drawn: list[Any]) -> None:
    two = {"a": ({"tau": 0.9}, 20, 0.8), "b": ({"tau": 0.3}, 10, 0.4)}
    assert reused(group(two), "eval") == [] and drawn == []
    assert reused(group({"a": ({"band": 8}, 20, 0.8), "b": ({"band": 16}, 1, 0.4)}), "eval") == []


def test_pictures_are_drawn() -> None:
    found = group({
        "a": ({"window": 64, "band": 8}, 20, 0.8), "b": ({"window": 128, "band": 8}, 18, 0.2),
        "c": ({"window": 64, "band": 16}, 19, 1.0), "d": ({"tau": 0.9}, 20, 0.8), "e": ({"tau": 0.3}, 10, 0.4),
        "f": ({"tau": 0.6}, 10, 0.4),
    })  # fmt: skip
    made = reused(found, "eval")
    assert [figure.file for figure in made] == ["eval-mac-tau.png", "eval-mac-grid-1.png"]
    assert all(figure.png.startswith(b"\x89PNG") for figure in made)
