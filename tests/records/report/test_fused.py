"""Kept answers, recomputed tokens and pictures of evaluations with fusion or eviction."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report import fused as module
from longreach.records.report.blocks import Figure, Table, Text
from longreach.records.report.fused import fused
from longreach.records.report.rows import groups
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for name in ("maps", "curves"):
        monkeypatch.setattr(module, name, lambda panels, *more, name=name: calls.update({name: panels}) or b"png")
    return calls


def test_other_methods_have_no_such_part() -> None:
    (group,) = groups([record_of(factory.small())])
    assert fused(group, "eval") == []


def test_kept_answers_and_tokens(drawn: dict[str, Any]) -> None:
    (group,) = groups([record_of(factory.fused())])
    blocks = fused(group, "eval")
    table = only(blocks, Table, "Fusion and eviction")
    assert table.head == ("method", "tokens", "recomputed", "reused", "exact", "kept, vt", "kept, qa_1", "kept, all")
    rows = cells(table)
    assert rows["1 dense"] == ["-"] * 7
    assert rows["3 a3 ratio=0.3"] == ["4000", "1200", "2200", "500", "3 of 4", "4 of 4", "7 of 8"]
    assert rows["6 dense evict=snapkv"] == ["-", "-", "-", "-", "1 of 4", "4 of 4", "5 of 8"]
    assert "rows that ran" in only(blocks, Text).text


def test_pictures(drawn: dict[str, Any]) -> None:
    (group,) = groups([record_of(factory.fused())])
    assert [b.file for b in fused(group, "e") if isinstance(b, Figure)] == ["e-tasks.png", "e-ratio.png"]
    (scores,) = drawn["maps"]
    assert scores.columns == ("vt", "qa_1") and scores.values[:3] == ((1.0, 1.0), (0.0, 1.0), (0.75, 1.0))
    (panel,) = drawn["curves"]
    found = {s.label: (s.x, s.y) for s in panel.series}
    assert found["a3"] == ((0.15, 0.3), (0.625, 0.875)) and found["full_reuse"] == ((0.0,), (0.5,))
    assert found["dense"] == ((0.0, 0.3), (1.0, 1.0)) and "dense evict=snapkv" not in found


def test_lengths_have_tables_of_their_own(drawn: dict[str, Any]) -> None:
    (group,) = groups([record_of(factory.fused(n), str(n)) for n in (4096, 1024)])
    blocks = fused(group, "e")
    assert [b.title for b in blocks if isinstance(b, Table)] == [
        "Fusion and eviction, 1024 tokens", "Fusion and eviction, 4096 tokens",
    ]  # fmt: skip
    assert [p.title for p in drawn["curves"]] == ["1024 tokens", "4096 tokens"] == [p.title for p in drawn["maps"]]


def test_one_ratio_is_no_curve(drawn: dict[str, Any]) -> None:
    content = factory.fused()
    for part in (content["methods"], *(entry["results"] for entry in content["tasks"].values())):
        del part["dense fuse=a3 fuse.ratio=0.3"]
    del content["tasks"]["qa_1"]
    (group,) = groups([record_of(content)])
    assert not [b for b in fused(group, "e") if isinstance(b, Figure)]
    assert only(fused(group, "e"), Table).head[-1] == "kept, vt"
