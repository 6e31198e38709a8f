"""The table and curves of perplexity say what the record holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longreach.records.report import perplexity as module
from longreach.records.report.blocks import Figure, Table, Text
from longreach.records.report.perplexity import perplexity
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(module, "curves", lambda panels: calls.extend(panels) or b"png")
    return calls


def test_numbers_are_the_records(drawn: list[Any]) -> None:
    found = perplexity(record_of(factory.perplexity()), "ppl")
    rows = cells(only(found, Table))
    assert rows["1 dense"] == ["7.3891", "2", "-", "4096", "100.0%", "9.4877", "2.25", "-", "4096", "25.0%",
                               "1.00 s", "10.00 ms"]  # fmt: skip
    assert rows["2 streaming_llm window=0.1"][:3] == ["8.3729", "2.125", "1.133"]  # exp(1/8)
    assert "book.txt (4096 tokens)" in only(found, Text).text and only(found, Figure).file == "ppl-nll.png"
    assert [p.title for p in drawn] == ["prefill", "prefill, over dense's", "decode", "decode, over dense's"]
    dense, stream, _ = drawn[0].series
    assert dense.dense and dense.x[:2] == (256.0, 768.0) and dense.y[0] == 2.5
    assert drawn[1].series[0].label == stream.label and drawn[1].series[0].y == pytest.approx([1 / 8] * 8)


def test_prefill_alone_and_without_dense(drawn: list[Any]) -> None:
    methods = {k: v for k, v in factory.METHODS.items() if k != "dense"}
    rows = cells(only(perplexity(record_of(factory.perplexity(methods, decode=False)), "ppl"), Table))
    assert rows["1 streaming_llm window=0.1"][2:] == ["-", "4096", "100.0%", *["-"] * 5, "1.00 s", "10.00 ms"]
    assert [p.title for p in drawn] == ["prefill"]


def test_windows_that_failed_are_told(drawn: list[Any]) -> None:
    content = factory.perplexity()
    assert not any(isinstance(b, Text) and b.loud for b in perplexity(record_of(content), "ppl"))
    content["failed"] = [{"method": "dense", "window": 3, "error": "RuntimeError: a kernel failed"}]
    found = perplexity(record_of(content), "ppl")
    assert "1 window failed" in only(found, Text, "1 window").text
    assert cells(only(found, Table, "Failed windows")) == {"3": ["dense", "RuntimeError: a kernel failed"]}


def test_a_method_that_broke_is_shown_as_it_is(drawn: list[Any]) -> None:
    content = factory.perplexity()
    part = content["results"]["streaming_llm window=0.1"]["prefill"]
    part.update(perplexity=math.inf, nll=math.nan)
    part["by_position"][0]["nll"] = math.inf
    rows = cells(only(perplexity(record_of(content), "ppl"), Table))
    assert rows["2 streaming_llm window=0.1"][:3] == ["inf", "nan", "inf"]
    assert math.isnan(drawn[0].series[1].y[0]) and math.isfinite(drawn[0].series[1].y[1])
