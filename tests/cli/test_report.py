"""`longreach report`: files and JSON, bad input in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import refused
from tests.records.report import factory


def test_files_are_listed_and_written(longreach: Any, drawn: None, tmp_path: Path) -> None:
    path = factory.save(tmp_path, factory.small())
    result = longreach("report", path, "--output", tmp_path / "out")
    assert result.code == 0 and result.err == ""
    assert result.out.splitlines() == [str(tmp_path / "out" / n) for n in ("report.html", "report.md",
                                       "eval-quality-decode.png")]  # fmt: skip
    assert all(Path(line).is_file() for line in result.out.splitlines())


def test_json_lists_what_was_written_and_what_to_mind(longreach: Any, tmp_path: Path) -> None:
    paths = [factory.save(tmp_path, {**factory.small(), "dirty": True}, "a.json"),
             factory.save(tmp_path, factory.fidelity(), "b.json")]  # fmt: skip
    found = json.loads(longreach("report", *paths, "--output", tmp_path / "out", "--json").out)
    assert {p.name for p in map(Path, found["written"])} == {p.name for p in (tmp_path / "out").iterdir()}
    assert "a.json was measured from a DIRTY tree" in found["warnings"][0]
    text = longreach("report", *paths, "--output", tmp_path / "out").out
    assert text.startswith("mind: a.json was measured from a DIRTY tree")


def test_a_record_of_eval_is_taken_as_it_is_written(
    longreach: Any, short_answers: None, tiny: Path, tmp_path: Path
) -> None:
    record = tmp_path / "eval.json"
    asked = ("--model", tiny, "--tasks", "niah_single_1,needle_sweep", "--length", 1500, "--samples", 3)
    assert longreach("eval", *asked, "--method", "streaming_llm window=99", "--output", record).code == 0
    result = longreach("report", record, "--output", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    names = {Path(p).name for p in json.loads(result.out)["written"]}
    assert {"eval-quality-decode.png", "eval-sweep.png", "eval-depth-1500.png"} <= names
    reads = json.loads(record.read_text())["tasks"]["needle_sweep"]["results"]["streaming_llm window=99"][
        "decode_reads"
    ]
    assert f"{reads['total']:.1%}" in (tmp_path / "out" / "report.md").read_text()


def test_records_of_perplexity_and_compare_are_taken(longreach: Any, drawn: None, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The brown hen laid an egg; the fox slept. " * 20)
    model = ("--model", tiny, "--method", "streaming_llm window=99", "--output")
    one, two = tmp_path / "p.json", tmp_path / "c.json"
    asked = ("perplexity", *model, one, "--text", text, "--length", 400, "--decode-tokens", 16)
    assert longreach(*asked).code == 0
    assert longreach("compare", *model, two, "--document", text, "--layers", "--steps", 4).code == 0
    result = longreach("report", one, two, "--output", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    names = {Path(p).name for p in json.loads(result.out)["written"]}
    assert names >= {"perplexity-nll.png", "fidelity-kl.png", "fidelity-layer-error.png"}
    markdown = (tmp_path / "out" / "report.md").read_text()
    found = json.loads(one.read_text())["results"]["streaming_llm window=99"]["decode"]["perplexity"]
    assert f"| {found:.5g} |" in markdown
    assert f"| {json.loads(two.read_text())['results']['streaming_llm window=99']['kl']:.3g} |" in markdown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["r.json", "no JSON"]),
        (json.dumps({"kind": "bench", "format": 1}), ["r.json", "'bench'", "longreach eval"]),
        (json.dumps({**factory.small(), "format": 2}), ["r.json", "format 2", "longreach eval --output"]),
        (json.dumps({k: v for k, v in factory.small().items() if k != "tasks"}), ["r.json: tasks is missing"]),
        (None, ["cannot read", "r.json", "check the path"]),
    ],
)
def test_bad_records(longreach: Any, tmp_path: Path, content: str | None, words: list[str]) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    refused(longreach("report", path, "--output", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written(longreach: Any, tmp_path: Path) -> None:
    path = factory.save(tmp_path, factory.small())
    refused(longreach("report", path, "--output", path), "cannot write the report", "choose another --output")
    refused(longreach("report", path, "--output", "/proc/none"), "/proc", "choose another --output")


def test_matplotlib_is_asked_for(longreach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = factory.save(tmp_path, factory.small())
    refused(longreach("report", path, "--output", tmp_path / "out"), "pip install 'longreach[report]'")
    assert not (tmp_path / "out").exists()


def test_output_is_needed(longreach: Any, tmp_path: Path) -> None:
    refused(longreach("report", tmp_path / "r.json"), "--output", "--help")
