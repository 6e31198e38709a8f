"""`longreach generation`: a table and a record that say the same, goes on where it stopped, bad input in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.evals.generation import Generation
from tests.cli.test_bad_input import refused

SHORT = "streaming_llm window=9"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("The brown hen laid an egg. The fox slept all day long.\n" * 20)
    return path


def asked(tiny: Path, book: Path, *more: Any) -> list[Any]:
    return ["generation", "--model", tiny, "--text", book, "--length", 100, "--steps", 20, "--limit", 2, *more]


def test_a_record_and_a_table(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    record = tmp_path / "g.json"
    result = longreach(*asked(tiny, book, "--method", SHORT, "--output", record))
    assert result.code == 0, result.err
    found = json.loads(record.read_text())
    assert found["kind"] == "generation" and list(found["results"]) == ["dense", SHORT]
    assert (
        found["config"]["windows"] == 2 and found["config"]["steps"] == 20 and found["files"][0]["name"] == "book.txt"
    )
    for label, x in found["results"].items():
        line = next(line for line in result.out.splitlines() if line.startswith(label[:10])).split()
        said = (f"{x['nll']:.4f}", f"{x['over_dense']:+.4f}", f"{x['by_position'][3]['nll']:.4f}")
        assert {*said, f"{x['repeated']:.1%}", f"{x['decode_reads']['total']:.1%}"} <= set(line)
        assert x["tokens"] == 40 and len(x["samples"]) == 2
    assert "20 tokens drawn by each method after 2 windows of 100 tokens, at temperature 1." in result.out
    assert not list(tmp_path.glob("*.journal"))
    refused(longreach("report", record, "--output", tmp_path / "report"), "kind 'generation'")


def test_one_window_at_no_temperature(longreach: Any, tiny: Path, book: Path) -> None:
    result = longreach(*asked(tiny, book, "--limit", 1, "--temperature", 0))
    assert result.code == 0 and "after 1 window of 100 tokens, at temperature 0." in result.out
    assert "dense" in result.out and " - " in result.out  # it does not leave its own text


def test_an_interrupted_command_goes_on(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, after, calls = tmp_path / "g.json", Generation._after, list[int]()

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return after(self, *args)

    command = asked(tiny, book, "--output", record)
    monkeypatch.setattr(Generation, "_after", interrupted)
    stopped = longreach(*command)
    assert stopped.code == 130 and "the same command continues" in stopped.err and not record.exists()
    refused(longreach(*command, "--steps", 9), "differs in config.steps")
    assert longreach(*command).code == 0 and len(calls) == 3 and not (tmp_path / "g.json.journal").exists()
    whole = json.loads(longreach(*asked(tiny, book, "--json")).out)
    found = json.loads(record.read_text())
    for one in (whole, found):
        for sample in one["results"]["dense"]["samples"]:
            del sample["seconds_per_token"]
    assert whole == found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--length", 2000], ["lower --length"]),
        (["--steps", 4000], ["context is 4096"]),
        (["--method", "quset"], ["unknown decode method 'quset'"]),
        (["--temperature", "-1"], ["temperature", "or 0 for greedy"]),
        (["--temperature", "warm"], ["--temperature"]),
        (["--text", "/nowhere"], ["cannot read /nowhere", "--text"]),
        (["--output", "/proc/none/p.json"], ["cannot write"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, book: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, book, *more)), *words)
