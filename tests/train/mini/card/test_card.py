"""The card as a whole: what it says, its code run, and a card of a model trained and measured a moment before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.train.mini.card.conftest import SOURCES, Made

from longreach.cli.main import main
from longreach.testing.recipe import SHAPE
from longreach.train.mini import card
from longreach.train.mini.config import Schedule
from longreach.train.mini.train import train


def row(text: str, name: str) -> list[str]:
    """The cells of the table row that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_figure_is_there(made: Made) -> None:
    card.write(made.model, made.logs, made.records)
    assert (made.model / "loss.png").read_bytes().startswith(b"\x89PNG") and not list(made.model.glob("*.part"))
    text = (made.model / "README.md").read_text()
    head = text.split("---\n")[1].splitlines()
    assert {"license: apache-2.0", "pipeline_tag: text-generation"} <= set(head)
    assert "# small-model\n" in text and "![" in text and "](loss.png)" in text
    assert "12.3 M parameters: 2 layers of width 32, 2 query and 1 KV heads of 16" in text
    assert row(text, "cpython") == ["3.11.7", "PSF-2.0", "5,390", "600,000", "7,654,321"]
    assert row(text, "package")[2:] == ["files", "prose, tokens", "prose, characters"]
    assert row(text, "numpy")[:3] == [SOURCES[1]["version"], SOURCES[1]["licence"], "240"]
    assert "1,000,000 tokens (900,000 of prose, 100,000 of code)" in text
    assert "saw 2.5 M tokens" in text and "2.5 times as many" in text and "no place of the training text" in text
    where = ["3", "GPU of a test", "2.13.0", "c0ffeec0ffee"]
    assert row(text, "1") == ["1.0", "100", "0.4 M", "512", *where]
    assert row(text, "2") == ["4.0", "400", "2.1 M", "512 to 1024", *where]
    assert "needles 75.0%, tracing 50.0%" in text
    assert row(text, "`niah_single_1`") == ["75.0% (30.1-95.4%)", "not measured"]
    assert row(text, "`vt`") == ["62.5% (21.9-90.8%)", "25.0% (4.6-69.9%)"]
    assert row(text, "**average**") == ["**73.9%** (59.4-84.5%)", "2 of 11 measured"]
    assert row(text, "`plan`")[0].startswith("25.0%")
    assert "512 tokens of prompt and answer: 4 prompts a task, seed 11, greedy answers, bfloat16 on GPU of a" in text
    assert "Below 60% at 512 tokens: `plan` (25.0%)." in text
    assert "Below 60% at 1024 tokens: `vt` (25.0%), `cwe` (25.0%)." in text
    assert "Not measured" not in text and "no sequence longer" not in text and "Nothing longer" not in text
    assert "--out run2 --minutes 5 --seed 3 --resume run1\n" in text
    assert "--tasks vt,cwe --length 1024 --samples 4 --seed 11 --method dense --output ruler-2.json\n" in text


def test_what_was_neither_trained_nor_measured_is_told(made: Made) -> None:
    for path in made.logs:
        made.edit(path, lambda log: [point.update(lengths=[256]) for point in log["curve"]] and None)
    made.edit(made.model / "corpus.json", lambda corpus: corpus.update(overlap_hits=2))
    made.edit(made.records[0], lambda record: [record["tasks"].pop(task) for task in ("fwe", "plan", "cwe")] and None)
    made.edit(made.records[0], lambda record: record["tasks"]["vt"]["results"]["dense"].update(failed=1))
    card.write(made.model, made.logs, made.records[:1])
    text = (made.model / "README.md").read_text()
    assert "No task was measured below 60%." in text and "Not measured: `cwe`, `fwe`." in text
    assert "no sequence longer than 256 tokens was trained" in text
    assert "Nothing longer than 512 tokens was measured" in text and "Other tasks" not in text
    assert "2 places of the training text shared 64 characters" in text and "; 1 failed)" in text


def test_its_code_runs(made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    card.write(made.model, made.logs, made.records)
    (code,) = re.findall(r"```python\n(.*?)```", (made.model / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(made.model.parent)
    names: dict[str, Any] = {}
    exec(code, names)
    length = names["inputs"].input_ids.shape[1]
    assert length < names["out"].shape[1] <= length + 12 and "4821973" in names["text"]
    answer = names["tokenizer"].decode(names["out"][0, length:], skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == answer.strip()


def test_a_model_trained_in_two_runs_and_measured(data: Path, tmp_path: Path) -> None:
    schedule = Schedule(stages=((0.0, (512,)),), microbatch_tokens=1024, microbatches=2, warmup_steps=3)
    options = {"shape": SHAPE, "schedule": schedule, "device": "cpu", "workers": 1, "compile_layers": False}
    folders = [tmp_path / "one", tmp_path / "two"]
    log = train(data, folders[0], minutes=0.02, say=lambda line: None, **options)
    train(data, folders[1], minutes=(log["seconds"] + 1) / 60, resume=folders[0], say=lambda line: None, **options)
    corpus = json.loads((folders[1] / "corpus.json").read_text())
    (folders[1] / "corpus.json").write_text(json.dumps({**corpus, "sources": SOURCES, "tokens": {"prose": 9}}))
    record = tmp_path / "vt.json"
    asked = ["eval", "--model", f"{folders[1]}", "--tasks", "vt", "--length", "900", "--samples", "2", "--method",
             "dense", "--output", f"{record}", "--device", "cpu"]  # fmt: skip
    assert main(asked) == 0
    card.write(folders[1], [folder / "train.json" for folder in folders], [record])
    text = (folders[1] / "README.md").read_text()
    score = json.loads(record.read_text())["tasks"]["vt"]["results"]["dense"]["score"]
    assert row(text, "`vt`")[0].startswith(f"{score:.1%}") and row(text, "2")[3] == "512"
