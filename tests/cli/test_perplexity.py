"""`longreach perplexity`: a table, a record that reports read, bad input in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.evals.perplexity import Perplexity
from longreach.records.report.reading import load
from tests.cli.test_bad_input import refused


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("The brown hen laid an egg. The fox slept all day long.\n" * 20)
    return path


def asked(tiny: Path, book: Path, *more: Any) -> list[Any]:
    return ["perplexity", "--model", tiny, "--text", book, "--length", 200, "--decode-tokens", 30, *more]


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
    assert longreach(*command).code == 130 and not record.exists()
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
