"""longreach.evaluate gives the record of `longreach eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import longreach
from longreach.cli.main import main
from longreach.errors import InvalidInput, UnknownName
from longreach.records.record import read
from longreach.testing.tiny import save_tiny, tiny_model, tiny_tokenizer

METHOD = "streaming_llm sinks=4 window=64"
ASKED: dict[str, Any] = {
    "tasks": "niah_single_1,niah_single_3",
    "methods": [METHOD],
    "samples": 2,
}


def same(record: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two runs: times."""
    text = json.dumps({k: v for k, v in record.items() if k not in ("seconds", "tasks", "config")})
    scores = {
        name: {label: (r["score"], r["decode_reads"]) for label, r in task["results"].items()}
        for name, task in record["tasks"].items()
    }
    asked = {name: task["samples"] for name, task in record["tasks"].items()}
    return {"about": json.loads(text), "scores": scores, "asked": asked}


def test_the_record_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "tiny")
    model, tokenizer = longreach.load(str(folder))
    got = longreach.evaluate(model, tokenizer, length=[1024, 1536], output=tmp_path / "mine.json.gz", **ASKED)
    assert read(tmp_path / "mine.json.gz") == json.loads(json.dumps(got))
    arguments = ["--tasks", ASKED["tasks"], "--method", METHOD, "--samples", "2", "--length", "1024,1536"]
    output = str(tmp_path / "theirs.json")
    assert main(["eval", "--model", str(folder), *arguments, "--batch", "2", "--output", output]) == 0
    capsys.readouterr()
    assert same(got) == same(read(tmp_path / "theirs.json"))
    assert set(got["tasks"]) == {f"{task}@{n}" for task in ("niah_single_1", "niah_single_3") for n in (1024, 1536)}


def test_a_model_made_in_python_and_bad_input(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    found = longreach.evaluate(model, tokenizer, tasks="niah_single_1", length=1024, samples=1)
    assert found["model"]["name"] == "LlamaForCausalLM" and found["model"]["sha256"] is None
    assert list(found["methods"]) == ["dense"]
    with pytest.raises(UnknownName, match="niah_singel_1"):
        longreach.evaluate(model, tokenizer, tasks="niah_singel_1", length=1024)
    with pytest.raises(UnknownName, match="qest"):
        longreach.evaluate(model, tokenizer, methods=["qest"], length=1024)
    with pytest.raises(InvalidInput, match="exceeds the model's context of 4096 tokens"):
        longreach.evaluate(model, tokenizer, length=8192)
    with pytest.raises(InvalidInput, match="fuse=a3: chunks are cut by `longreach eval`"):
        longreach.evaluate(model, tokenizer, methods=["dense fuse=a3"], length=1024)
