"""`longreach demo`: on the shipped model, and its table on a tiny one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from longreach.adapters.transformers import load, planned_shape
from longreach.evals.methods import pairings
from longreach.methods.registry import unfit

LENGTH = 600
FEW = ["oracle_top_k", "streaming_llm"]


def verdicts(out: str) -> dict[str, list[str]]:
    """Method (prefill/decode) -> right or wrong, fact by fact."""
    found, prefill = {}, ""
    for line in out.splitlines():
        words = line.split()
        if line.startswith("-- "):
            prefill = words[1]
        elif line.endswith(" s") or line.endswith(" ms"):
            found[f"{prefill}/{words[0]}"] = [w for w in words if w in ("right", "wrong")]
    return found


@pytest.mark.parametrize("methods", [FEW, pytest.param(None, marks=pytest.mark.sweep)])
def test_the_shipped_model_finds_the_facts_where_its_attention_reads_them(
    longreach: Any, monkeypatch: pytest.MonkeyPatch, methods: list[str] | None
) -> None:
    monkeypatch.setattr("longreach.evals.demo.pairings", lambda left_out: pairings(methods, left_out))
    result = longreach("demo", "--length", LENGTH)
    assert result.code == 0 and result.err == ""
    found = verdicts(result.out)
    assert found["dense/dense"] == found["dense/oracle_top_k"] == ["right"] * 3
    # the window reaches back 30 %: it holds the fact at 90 %, not those at 10 % and 50 %
    assert found["dense/streaming_llm"] == found["streaming_llm/streaming_llm"] == ["wrong", "wrong", "right"]
    assert all(len(line) <= 80 for line in result.out.splitlines())


@pytest.fixture
def on_tiny(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.cli.demo.load_model", lambda args: load(tiny))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods beside dense attention, not all."""
    monkeypatch.setattr("longreach.evals.demo.pairings", lambda left_out: pairings(FEW, left_out))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(
    longreach: Any, on_tiny: None, tiny: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All methods in 80 columns; in 120 the column that has room there."""
    monkeypatch.setenv("COLUMNS", str(width))
    methods = None if width == 80 else FEW
    monkeypatch.setattr("longreach.evals.demo.pairings", lambda left_out: pairings(methods, left_out))
    result = longreach("demo", "--length", 1500)
    lines = result.out.splitlines()
    assert result.code == 0 and all(cell_len(line) <= width for line in lines)
    header = next(line for line in lines if line.startswith("decode"))
    for title in ("at 10%", "at 50%", "at 90%", "bytes", "1st tok", "per tok"):
        assert title in header
    assert ("meta" in header) == (width == 120)
    found = verdicts(result.out)
    asked = sum(len(decodes) for _, decodes in pairings(methods, left_out=unfit(planned_shape(load(tiny)[0]))))
    assert len(found) == asked and all(len(verdict) == 3 for verdict in found.values())
    flat = " ".join(result.out.split())
    over = dict.fromkeys(("oracle_top_k", "oracle_sampling"), "which scores every key first")
    above = flat.partition("Above 100%: ")[2].partition("1st tok")[0]
    rows = [line.split() for line in lines if line.endswith((" s", " ms")) and not line.startswith("--")]
    costly = {row[0] for row in rows if any(w.endswith("%") and float(w[:-1]) > 100 for w in row)}
    assert "oracle_top_k" in costly and above.count("which ") == len(costly)
    for name in costly:
        assert f"{name}, {over.get(name, 'which at this length saves less than its metadata takes')}" in above
    for said in ("torch", "transformers", "threads", "characters a token", "default options"):
        assert said in flat


def test_json_holds_facts_answers_and_where_the_numbers_come_from(longreach: Any, on_tiny: None, few: None) -> None:
    result = longreach("demo", "--length", 1100, "--seed", 5, "--json")
    found = json.loads(result.out)
    assert {"commit", "python", "versions", "device"} <= found.keys()
    assert [fact["depth"] for fact in found["facts"]] == [0.1, 0.5, 0.9]
    assert found["tokens"] == found["characters"] + 1  # one token a byte, and the first
    for row in found["rows"]:
        for fact, said in zip(found["facts"], row["answers"], strict=True):
            assert said["expected"] == fact["value"] and fact["key"] == said["key"] and fact["key"] in fact["statement"]
        assert row["first_token_seconds"] > row["read_seconds"] > 0
        assert row["decode_reads"]["total"] > 0
