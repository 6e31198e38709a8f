"""Tables and pictures of `longreach fusion` show what the record holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longreach.records.report import fusion_figures as module
from longreach.records.report.blocks import Figure, Table, Text
from longreach.records.report.fusion import fusion
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    for name in ("maps", "curves"):
        monkeypatch.setattr(module, name, lambda panels, *more: calls.append(panels) or b"png")
    return calls


def test_tables(drawn: list[Any]) -> None:
    blocks = fusion(record_of(factory.fusion()), "fusion")
    table = only(blocks, Table, "Choices and errors")
    assert table.head[:6] == ("method", "recomputed tokens", "of the prompt", "of the top 64", "of attention",
                              "of the most changed")  # fmt: skip
    rows = cells(table)
    assert rows["1 full_reuse"] == ["0", "0.0%", "0.0%", "0.0%", "-", "0.2", "0.2", "0.2"]
    assert rows["3 a3 ratio=0.15"] == ["150", "15.0%", "30.0%", "22.5%", "15.0%", "0.17", "0.17", "0.17"]
    tasks = only(blocks, Table, "Choices by task")
    assert tasks.head[1:] == ("vt: of the top 64", "vt: of the most changed", "qa_1: of the top 64",
                              "qa_1: of the most changed")  # fmt: skip
    assert cells(tasks)["2 a3 ratio=0.3"] == ["0.0%", "30.0%", "30.0%", "30.0%"]
    layers = only(blocks, Table, "Error of keys by layer")
    assert layers.head == ("method", "0", "1", "2", "3") and cells(layers)["1 full_reuse"] == ["-", "0.1", "0.2", "0.3"]
    about = only(blocks, Text, "2 prompts of vt, qa_1, 1000 tokens on average, of which 40").text
    assert "at most 256 tokens, computed behind BOS" in about
    assert "in layer 3" in only(blocks, Text, "Hit rates").text


def test_hit_rates_by_recomputed_share(drawn: list[Any]) -> None:
    fusion(record_of(factory.fusion()), "fusion")
    top, attention, change, error = drawn[0]
    assert [(s.label, s.x, s.y) for s in top.series] == [("full_reuse", (0.0,), (0.0,)),
                                                         ("a3", (0.15, 0.3), (0.3, 0.6))]  # fmt: skip
    assert top.share and attention.series[1].y == pytest.approx((0.225, 0.45))
    assert [(s.label, s.y) for s in change.series] == [("a3", (0.15, 0.3))]  # full_reuse chooses nothing
    assert error.series[1].y == pytest.approx((0.17, 0.14)) and not error.share
    assert [[s.number for s in panel.series] for panel in (top, change)] == [[1, 2], [2]]  # colours of the legend
    first, second = drawn[1]
    assert first.columns == ("vt", "qa_1") and first.values == ((0.0, 0.0), (0.0, 0.3), (0.0, 0.15))
    assert second.values[0] == (None, None)


def test_errors_by_layer_for_each_ratio(drawn: list[Any]) -> None:
    blocks = fusion(record_of(factory.fusion()), "fusion")
    assert [b.file for b in blocks if isinstance(b, Figure)] == [
        "fusion-hits.png", "fusion-tasks.png", "fusion-layers-0.15.png", "fusion-layers-0.3.png",
    ]  # fmt: skip
    few, many = drawn[2:]
    assert [p.title for p in few] == [f"{x}, ratio 0.15" for x in ("the question's attention", "values", "keys",
                                                                   "keys, without full_reuse")]  # fmt: skip
    assert [s.label for s in few[2].series] == ["full_reuse", "a3"] and [s.label for s in few[3].series] == ["a3"]
    a3 = few[0].series[1]
    assert a3.x == (0.0, 1.0, 2.0, 3.0) and math.isnan(a3.y[0]) and a3.y[1:] == pytest.approx((0.085, 0.17, 0.255))
    assert many[0].series[1].y[1:] == pytest.approx((0.07, 0.14, 0.21))


def test_one_ratio_and_one_task(drawn: list[Any]) -> None:
    content = factory.fusion()
    for part in (content["methods"], content["results"]):
        del part["dense fuse=a3 fuse.ratio=0.3"], part["dense fuse=full_reuse"]
    del content["tasks"]["qa_1"]
    blocks = fusion(record_of(content), "fusion")
    assert [b.file for b in blocks if isinstance(b, Figure)] == ["fusion-hits.png", "fusion-layers.png"]
    assert len(drawn[1]) == 3 and "full_reuse" not in only(blocks, Figure, "fusion-layers").caption
