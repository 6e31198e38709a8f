"""Scores by depth and length end up in the right cells."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report import depth
from longreach.records.report.blocks import Figure
from longreach.records.report.depth import depth_of, depths
from longreach.records.report.rows import groups
from tests.records.report import factory
from tests.records.report.factory import answer, evaluation, record_of, result, task


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed to the drawing: (panels, xlabel, ylabel, scale)."""
    calls: list[Any] = []
    monkeypatch.setattr(depth, "maps", lambda *a: calls.append(a) or b"png")
    return calls


def test_length_by_depth_a_map_a_method(drawn: list[Any]) -> None:
    (group,) = groups([record_of(factory.sweep(n), str(n)) for n in (4096, 1024)])
    (figure,) = depths(group, "eval")
    ((panels, xlabel, ylabel, _),) = drawn
    assert isinstance(figure, Figure) and figure.file == "eval-sweep.png"
    assert "length (tokens)" in xlabel and "depth" in ylabel
    assert [p.title for p in panels] == ["1 dense", "2 streaming_llm window=0.1", "3 oracle_top_k k=0.025"]
    assert panels[1].rows == ("0%", "25%", "50%", "75%", "100%") and panels[1].columns == ("1024", "4096")
    assert panels[1].values == ((0.0, 0.0),) * 4 + ((1.0, 1.0),)
    assert panels[0].values == ((1.0, 1.0),) * 5


def test_several_lengths_of_one_record_are_one_map_a_method(drawn: list[Any]) -> None:
    content = factory.sweep(4096)
    content["config"]["lengths"] = [1024, 4096]
    content["tasks"] = {
        f"needle_sweep@{n}": {**factory.sweep(n)["tasks"]["needle_sweep"], "task": "needle_sweep", "length": n}
        for n in (1024, 4096)
    }
    (group,) = groups([record_of(content)])
    depths(group, "eval")
    ((panels, *_),) = drawn
    assert len(panels) == 3 and panels[1].columns == ("1024", "4096")
    assert panels[1].values == ((0.0, 0.0),) * 4 + ((1.0, 1.0),) and "1024, 4096 tokens" in group.title


def test_one_length_is_methods_by_depth(drawn: list[Any]) -> None:
    depths(groups([record_of(factory.sweep(4096))])[0], "eval")
    (((panel,), _, _, _),) = drawn
    assert panel.rows[1] == "2 streaming_llm window=0.1" and panel.values[1] == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_depths_that_differ_between_lengths_leave_cells_empty_and_many_are_put_in_tenths(drawn: list[Any]) -> None:
    (group,) = groups([record_of(factory.sweep(1024, of=3), "a"), record_of(factory.sweep(4096, of=2), "b")])
    depths(group, "eval")
    assert drawn[0][0][0].values == ((1.0, 1.0), (1.0, None), (1.0, 1.0))
    depths(groups([record_of(factory.sweep(4096, of=41))])[0], "eval")
    (panel,) = drawn[1][0]
    assert panel.columns[0] == "0-10%" and panel.columns[-1] == "90-100%"
    assert panel.values[1] == (0.0,) * 9 + (1.0,)


def test_tasks_with_one_needle_by_fifths(drawn: list[Any]) -> None:
    def one(scores: list[float], at: list[Any]) -> dict[str, Any]:
        answers = [answer(n, s) for n, s in enumerate(scores)]
        made = task({x: result(x, answers) for x in factory.METHODS}, depths=[0.0] * len(scores))
        for sample, place in zip(made["samples"], at, strict=True):
            sample["facts"] = {"depths": place}
        return made

    tasks = {
        "niah_single_1": one([1.0, 0.0, 1.0], [[0.1], [0.15], [1.0]]),
        "niah_multikey_1": one([1.0, 1.0], [[0.2], [0.39]]),
        "niah_multiquery": one([1.0], [[0.2, 0.4]]),
        "vt": one([1.0], [[0.5]]),
    }
    (figure,) = depths(groups([record_of(evaluation(tasks))])[0], "eval")
    panels = drawn[0][0]
    assert isinstance(figure, Figure) and figure.file == "eval-depth-4096.png"
    assert [p.title for p in panels] == ["all 2 tasks (n=5)", "niah_single_1 (n=3)", "niah_multikey_1 (n=2)"]
    assert panels[1].values[0] == (0.5, None, None, None, 1.0) and panels[2].values[0] == (None, 1.0, None, None, None)
    assert panels[0].values[2] == (0.5, 1.0, None, None, 1.0)


def test_fused_methods_have_maps_under_short_names(drawn: list[Any]) -> None:
    content, places = factory.fused(), [0.0, 0.25, 0.75, 1.0]
    sweeps = {}
    for length in (1024, 4096):
        one = {**content["tasks"]["vt"], "task": "needle_sweep", "length": length}
        sweeps[f"needle_sweep@{length}"] = {**one, "samples": [
            {**s, "facts": {"depth": d}} for s, d in zip(one["samples"], places, strict=True)
        ]}  # fmt: skip
    content["tasks"], content["config"]["lengths"] = sweeps, [1024, 4096]
    depths(groups([record_of(content)])[0], "eval")
    panels = drawn[0][0]
    assert [p.title for p in panels] == ["1 dense", "2 full_reuse", "3 a3 ratio=0.3", "4 a3 ratio=0.15",
                                         "5 a3 evict=snapkv", "6 dense evict=snapkv"]  # fmt: skip
    assert panels[2].values == ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0)) and panels[2].columns == (
        "1024",
        "4096",
    )


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"depth": 0.5}, 0.5), ({"depths": [0.25]}, 0.25), ({"depths": [0.1, 0.2]}, None), ({}, None),
        ({"depth": "deep"}, None), ({"depth": True}, None), ({"depth": 3}, None), ({"depths": 0.5}, None),
        ({"depths": []}, None), ({"depth": float("nan")}, None),
    ],
)  # fmt: skip
def test_depth_of_a_sample(facts: dict[str, Any], expected: float | None) -> None:
    assert depth_of({"facts": facts}) == expected
