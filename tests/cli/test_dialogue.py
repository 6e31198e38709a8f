"""`longreach dialogue`: a table and a record that say the same, and bad input in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longreach.cli.dialogue import show, summary
from tests.cli.test_bad_input import refused

ASKED = ("dialogue", "--model", "mini", "--device", "cpu", "--length", 250, "--questions", 1)
LENGTH = 600  # tokens of the tiny model's, a byte each
SHORT = "streaming_llm window=64"


def test_a_record_and_a_table(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "d.json"
    asked = ("dialogue", "--model", tiny, "--device", "cpu", "--length", LENGTH, "--questions", 1)
    result = longreach(*asked, "--samples", 1, "--method", SHORT, "--output", record)
    assert result.code == 0, result.err
    found = json.loads(record.read_text())
    assert (
        found["kind"] == "dialogue" and found["config"]["samples"] == 1 and list(found["results"]) == ["dense", SHORT]
    )
    assert all(x["prompt"] <= LENGTH and x["decoded"] > 25 for x in found["tokens"])
    for label, x in found["results"].items():
        line = next(line for line in result.out.splitlines() if line.startswith(label[:10])).split()
        assert f"{x['score']:.1%}" in line and f"{x['kl']:.4f}" in line and f"{x['decode_reads']['total']:.1%}" in line
        assert len(x["samples"]) == 1 and all(len(part["right"]) == 1 for part in x["samples"])
    assert f"1 dialogue of 1 question after {LENGTH} tokens of text" in result.out
    assert not list(tmp_path.glob("*.journal"))


def test_a_summary_counts_answers_quarter_by_quarter() -> None:
    part = {"right": [True, True, True, False], "nll": 1.0, "nll_answers": 0.5, "kl": 0.1, "agree": 0.9,
            "bytes": [5, 5, 2, 40]}  # fmt: skip
    other = {**part, "right": [True, False, True, False], "nll": 2.0, "bytes": [10, 10, 8, 40]}
    found = summary([part, other])
    assert found["score"] == 5 / 8 and found["by_quarter"] == [1.0, 0.5, 1.0, 0.0] and found["nll"] == 1.5
    assert found["decode_reads"] == {"total": 0.5, "keys": 15 / 80, "values": 15 / 80, "metadata": 10 / 80}


WHERE = {"device": {"type": "cuda", "name": "a GPU"}, "versions": {"torch": "2", "transformers": "5"}}


def test_one_dialogue_is_called_one(capsys: Any) -> None:
    for samples, words in ((1, "1 dialogue of 1 question"), (2, "2 dialogues of 1 question")):
        config = {"samples": samples, "questions": 1, "length": 90}
        show({"config": config, "tokens": [{"decoded": 40}] * samples, "results": {}, **WHERE})
        said = " ".join(capsys.readouterr().out.split())
        assert f"{words} after 90 tokens of text, 40 tokens decoded in each" in said


def test_bad_input(longreach: Any) -> None:
    refused(longreach(*ASKED, "--method", "nothing"), "nothing")
    refused(longreach(*ASKED, "--questions", 0), "at least 1")
    refused(longreach(*ASKED, "--questions", 30), "a dialogue")
