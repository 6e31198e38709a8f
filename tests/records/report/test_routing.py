"""Tables and pictures of `longreach mka routing` show what the record holds, and what a record must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report import routing as module
from longreach.records.report.blocks import Figure, Table, Text
from longreach.records.report.reading import load
from longreach.records.report.routing import routing
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


def test_tables_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "curves", lambda panels: calls.extend(panels) or b"png")
    blocks = routing(record_of(factory.routing()), "mka-routing")
    rows = cells(only(blocks, Table, "Weights of levels by layer"))
    assert rows == {name: ["0.875", "0.125", "1.25", "0.25", "2", "2"] for name in ("1", "2", "mean")}
    parts = cells(only(blocks, Table, "Weights of levels by position, mean over layers"))
    assert parts == {"0-7": ["1", "0", "1", "0"], "8-15": ["0.75", "0.25", "1.5", "0.5"]}
    assert "block_mka, routing=learned. Texts: book.txt (100 tokens); 48 tokens" in only(blocks, Text).text
    assert only(blocks, Figure).file == "mka-routing-levels.png"
    assert [panel.title for panel in calls] == [f"{x} by {y}" for x in ("lambda", "weight")
                                                for y in ("layer", "position")]  # fmt: skip
    by_layer, by_position, *_ = calls
    assert [(s.label, s.x, s.y) for s in by_layer.series] == [("1 local", (1.0, 2.0), (0.875, 0.875)),
                                                              ("3 long-term", (1.0, 2.0), (0.125, 0.125))]  # fmt: skip
    assert [(s.x, s.y) for s in by_position.series] == [((4.0, 12.0), (1.0, 0.75)), ((4.0, 12.0), (0.0, 0.25))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(levels=[3, 1]), "levels: expected some of 1, 2, 3, ascending"),
        (lambda r: r.update(levels=[1, 4]), "levels: expected some of 1, 2, 3, ascending"),
        (lambda r: r["layers"].update(last=r["layers"]["1"]), "expected layer numbers, got 'last'"),
        (lambda r: r["layers"]["2"]["gate"].pop(), "layers.2.gate: expected 2 items"),
        (lambda r: r["positions"].pop(), "layers.1.by_position.weight: expected 1 items"),
    ],
)
def test_records_that_are_not_whole(tmp_path: Path, change: Any, words: str) -> None:
    content = factory.routing()
    change(content["results"])
    with pytest.raises(InvalidInput) as error:
        load(factory.save(tmp_path, content))
    assert words in str(error.value) and "measure it again with longreach mka routing --output" in str(error.value)
