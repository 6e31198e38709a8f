"""`longreach perplexity`: a table, a record that reports read, bad input in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import Reader
from longreach.evals.perplexity import Perplexity
from longreach.records.report.reading import load
from tests.cli.test_bad_input import refused


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("The brown hen laid an egg. The fox slept all day long.\n" * 20)
    return path


def asked(tiny: Path, book: Path, *more: Any) -> list[Any]:
    return ["perplexity", "--model", tiny, "--text", book, "--length", 200, "--decode-tokens", 16, *more]


def test_a_record_and_a_table(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    record = tmp_path / "p.json"
    result = longreach(*asked(tiny, book, "--method", "streaming_llm window=9", "--output", record, "--limit", 2))
    assert result.code == 0, result.err
    found = load(record).content
    assert list(found["results"]) == ["dense", "streaming_llm window=9"] and found["config"]["windows"] == 2
    for label, part in found["results"].items():
        assert label in result.out and f"{part['decode']['perplexity']:.4g}" in result.out
    assert found["files"][0]["name"] == "book.txt" and "+0.0000" in result.out
    again = json.loads(longreach(*asked(tiny, book, "--json", "--limit", 2)).out)
    assert again["results"]["dense"]["prefill"] == found["results"]["dense"]["prefill"]


def test_perplexity_by_position_is_shown(longreach: Any, tiny: Path, book: Path) -> None:
    methods = "--method", "streaming_llm window=9", "--method", "streaming_llm/streaming_llm window=9"
    found = json.loads(longreach(*asked(tiny, book, "--limit", 1, *methods, "--json")).out)["results"]
    shown = [line.split() for line in longreach(*asked(tiny, book, "--limit", 1, *methods)).out.splitlines()]
    rows = {row[0]: row[1:] for row in shown if row and row[0].replace("-", "").isdigit()}
    for phase, labels in (("prefill", ["dense", list(found)[2]]), ("decode", list(found))):
        whole = found["dense"][phase]["by_position"]
        for first, second in zip(whole[::2], whole[1::2], strict=True):
            cells = rows[f"{first['start']}-{second['stop'] - 1}"]
            for cell, label in zip(cells, labels, strict=True):
                pair = [p for p in found[label][phase]["by_position"] if first["start"] <= p["start"] < second["stop"]]
                nll = sum(p["nll"] * p["tokens"] for p in pair) / sum(p["tokens"] for p in pair)
                assert cell == f"{math.exp(nll):.4g}"


def test_windows_that_fail_are_an_exit_code_and_measured_again(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, score, calls = tmp_path / "p.json", Reader.score, list[int]()

    def crash(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a kernel failed")
        return score(self, *args)

    monkeypatch.setattr(Reader, "score", crash)
    command = asked(tiny, book, "--limit", 3, "--output", record)
    result = longreach(*command)
    assert result.code == 3 and "1 windows failed with an error; the same command measures them again" in result.err
    assert "window 1, dense: RuntimeError: a kernel failed" in result.out
    found = load(record).content
    assert found["failed"] == [{"method": "dense", "window": 1, "error": "RuntimeError: a kernel failed"}]
    assert len(found["results"]["dense"]["prefill"]["by_window"]) == 2 and found["config"]["windows"] == 3
    assert longreach(*command).code == 0 and len(calls) == 4 and load(record).content["failed"] == []
    assert not (tmp_path / "p.json.journal").exists()


def test_a_method_without_results_is_told(
    longreach: Any, tiny: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Perplexity._decode

    def crash(self: Any, reader: Any, *args: Any) -> Any:
        if reader.session.decode.name == "dense":
            raise RuntimeError("dense is broken")
        return decode(self, reader, *args)

    monkeypatch.setattr(Perplexity, "_decode", crash)
    result = longreach(*asked(tiny, book, "--limit", 2, "--method", "streaming_llm"))
    assert result.code == 3 and "2 windows failed" in result.err
    (row,) = [line.split() for line in result.out.splitlines() if line.startswith("[2] streaming_llm")]
    assert row[4] == "-"  # there is no dense to be over


def test_an_interrupted_command_goes_on(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, window, calls = tmp_path / "p.json", Perplexity._window, list[int]()

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return window(self, *args)

    command = asked(tiny, book, "--limit", 4, "--output", record)
    monkeypatch.setattr(Perplexity, "_window", interrupted)
    stopped = longreach(*command)
    assert stopped.code == 130 and "the same command continues" in stopped.err and not record.exists()
    refused(longreach(*command, "--decode-tokens", 9), "differs in config.decode_tokens", "remove the file")
    assert longreach(*command).code == 0
    assert len(calls) == 3 + 2 and not (tmp_path / "p.json.journal").exists()
    assert len(load(record).content["results"]["dense"]["prefill"]["by_window"]) == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--length", 5000], ["context is 4096"]),
        (["--length", 2000], ["lower --length"]),
        (["--decode-tokens", 199], ["decode tokens", "199"]),
        (["--method", "quset"], ["unknown decode method 'quset'"]),
        (["--text", "/nowhere"], ["cannot read /nowhere", "--text"]),
        (["--output", "/proc/none/p.json"], ["cannot write"]),
        (["--limit", 0], ["at least 1"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, book: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, book, *more)), *words)
