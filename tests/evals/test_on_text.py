"""longreach.perplexity and longreach.compare give what the commands give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import longreach
from longreach.cli.main import main
from longreach.errors import InvalidInput, UnknownName
from longreach.records.record import read
from longreach.testing.tiny import save_tiny

METHOD = "streaming_llm sinks=4 window=64"
TEXT = "The boats left at noon for the island, and came back when the sun was low. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return longreach.load(str(folder))


def test_the_record_of_perplexity_is_that_of_the_command(
    folder: Path, loaded: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boats.txt").write_text(TEXT)
    asked: dict[str, Any] = {"methods": [METHOD], "length": 256, "decode_tokens": 16, "limit": 2}
    got = longreach.perplexity(*loaded, tmp_path / "boats.txt", output=tmp_path / "mine.json", **asked)
    assert read(tmp_path / "mine.json") == json.loads(json.dumps(got))
    arguments = ["--text", str(tmp_path / "boats.txt"), "--method", METHOD, "--length", "256"]
    arguments += ["--decode-tokens", "16", "--limit", "2", "--output", str(tmp_path / "theirs.json")]
    assert main(["perplexity", "--model", str(folder), *arguments]) == 0
    assert "[2] streaming_llm" in capsys.readouterr().out
    theirs = read(tmp_path / "theirs.json")
    for record in (got, theirs):
        for result in record["results"].values():
            del result["seconds"]
    assert json.loads(json.dumps(got)) == theirs
    assert list(got["results"]) == ["dense", METHOD] and got["config"]["windows"] == 2


def test_texts_in_memory(loaded: tuple[Any, Any]) -> None:
    got = longreach.perplexity(*loaded, [TEXT, TEXT.upper()], length=128, decode_tokens=0)
    assert [one["name"] for one in got["files"]] == ["text 0", "text 1"]
    assert got["results"]["dense"]["decode"] is None and got["results"]["dense"]["prefill"]["perplexity"] > 1
    with pytest.raises(InvalidInput, match="text 0 is empty; give one with words in it"):
        longreach.perplexity(*loaded, "")
    with pytest.raises(UnknownName, match="qest"):
        longreach.perplexity(*loaded, TEXT, methods=["qest"])


def test_comparisons_are_those_of_the_command(
    folder: Path, loaded: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, other = longreach.compare(*loaded, TEXT, methods=[METHOD], steps=8, past_end=True)
    assert (dense.label, dense.kl, dense.first_divergence) == ("dense", 0.0, None)
    assert other.label == METHOD and other.kl > 0 and other.decode_reads is not None
    (tmp_path / "boats.txt").write_text(TEXT)
    arguments = ["--document", str(tmp_path / "boats.txt"), "--method", METHOD, "--steps", "8", "--past-end", "--json"]
    assert main(["compare", "--model", str(folder), *arguments]) == 0
    theirs = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(one["label"], one["kl"], one["first_divergence"]) for one in theirs] == [
        (one.label, one.kl, one.first_divergence) for one in (dense, other)
    ]
    with pytest.raises(UnknownName, match="qest"):
        longreach.compare(*loaded, TEXT, methods=["qest"])
