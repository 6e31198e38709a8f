"""--host and --device-memory: the same answers with keys and values in host memory, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from longreach.evals.methods import pairings
from tests.cli.test_bad_input import refused

QUESTION = ("--question", "Who slept?")
QUEST = ("--decode", "quest", "--set", "decode.dense_layers=[0]", "--set", "decode.k=0.2")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=".* layers? whole at each step")


def run(tiny: Path, document: Path, *more: Any, text: str = "--document") -> list[Any]:
    return ["run", "--model", tiny, text, document, *QUESTION, "--max-new-tokens", 8, *more]


def test_a_document_is_answered_from_host_memory(longreach: Any, tiny: Path, document: Path) -> None:
    plain = json.loads(longreach(*run(tiny, document, *QUEST, "--json")).out)
    result = longreach(*run(tiny, document, *QUEST, "--host", "--json", "--prefill-chunk-size", 16))
    assert result.code == 0, result.err
    host = json.loads(result.out)
    assert host["answers"][0]["answer"] == plain["answers"][0]["answer"]
    memory = host["report"]["memory"]
    assert memory["device_layers"] == [0] and memory["host_layers"] == [1] and memory["staging_bytes"] > 0
    assert "memory" not in plain["report"]


def test_the_summary_says_where_keys_and_values_lie(longreach: Any, tiny: Path, document: Path) -> None:
    result = longreach(*run(tiny, document, *QUEST, "--host", "--device-memory", "1GB"))
    said = " ".join(result.err.split())
    assert result.code == 0 and "Keys and values: 0 layers (0.00 KiB) in host memory" in said
    assert "2 layers (" in said and "Read 100.0% in prefill (dense)" in said
    chunks = longreach(*run(tiny, document, *QUEST, "--host", text="--documents"))
    said = " ".join(chunks.err.split())
    assert chunks.code == 0 and "Keys and values: 1 layer (" in said and "in host memory; 1 layer" in said


def test_dense_attention_over_the_link_is_warned_of(longreach: Any, tiny: Path, document: Path) -> None:
    warnings.resetwarnings()
    result = longreach(*run(tiny, document, "--host"))
    assert result.code == 0 and "dense reads 2 layers whole at each step" in result.err


def test_methods_are_compared_over_host_memory(longreach: Any, tiny: Path, document: Path, tmp_path: Path) -> None:
    record = tmp_path / "c.json"
    chosen = ("--methods", "quest", "--set", "quest.dense_layers=[0]", "--set", "quest.k=0.3", *QUESTION)
    asked = ["compare", "--model", tiny, "--document", document, "--steps", 4, *chosen]
    plain = json.loads(longreach(*asked, "--json").out)
    host = json.loads(longreach(*asked, "--json", "--host", "--output", record).out)
    for a, b in zip(plain["comparisons"], host["comparisons"], strict=True):
        assert a["memory"] is None and b["memory"]["host_layers"] == [1]
        assert (a["kl_steps"], a["decode_reads"]) == (b["kl_steps"], b["decode_reads"])
    config = json.loads(record.read_text())["config"]
    assert config["host"] is True and config["device_memory"] is None and config["prefill_chunk_size"] == 4096
    table = longreach(*asked, "--host")
    assert table.code == 0 and "Keys and values: 1 layer (" in " ".join(table.out.split())


def test_texts_are_generated_over_host_memory(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The brown hen laid an egg. The fox slept all day long.\n" * 20)
    asked = ["generation", "--model", tiny, "--text", book, "--length", 100, "--steps", 12, "--limit", 1,
             "--method", "quest dense_layers=[0] k=0.3", "--json"]  # fmt: skip
    plain, host = json.loads(longreach(*asked).out), json.loads(longreach(*asked, "--host").out)
    assert host["config"]["host"] is True and "host" not in plain["config"]
    for label, x in plain["results"].items():
        assert x["nll"] == host["results"][label]["nll"]


def test_texts_are_predicted_over_host_memory(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The brown hen laid an egg. The fox slept all day long.\n" * 20)
    asked = ["perplexity", "--model", tiny, "--text", book, "--length", 100, "--decode-tokens", 20, "--limit", 1,
             "--method", "quest dense_layers=[0] k=0.3", "--json"]  # fmt: skip
    plain = json.loads(longreach(*asked).out)
    host = json.loads(longreach(*asked, "--host", "--device-memory", "1MB").out)
    assert host["config"] == {**plain["config"], "host": True, "device_memory": 10**6, "prefill_chunk_size": 4096}
    for label, x in plain["results"].items():
        other = host["results"][label]
        assert x["decode"]["nll"] == other["decode"]["nll"] and x["decode_reads"] == other["decode_reads"]
        assert x["prefill"]["nll"] == other["prefill"]["nll"]


def test_tasks_are_asked_over_host_memory(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    asked = ["eval", "--model", tiny, "--tasks", "qa_synthetic_1", "--length", 600, "--samples", 1, "--json",
             "--method", "quest dense_layers=[0] k=0.3", "--method", "dense fuse=a3"]  # fmt: skip
    plain = json.loads(longreach(*asked).out)
    kept = tmp_path / "e.json"
    result = longreach(*asked, "--host", "--output", kept)
    assert result.code == 0, result.err
    host = json.loads(result.out)
    assert host["config"]["host"] is True and "host" not in plain["config"]
    for name, task in plain["tasks"].items():
        for label, x in task["results"].items():
            other = host["tasks"][name]["results"][label]
            assert x["failed"] == other["failed"] == 0
            assert [a["text"] for a in x["answers"]] == [a["text"] for a in other["answers"]]
            assert x["decode_reads"] == other["decode_reads"]
    assert longreach("report", kept, "--output", tmp_path / "report").code == 0
    assert "--host" in (tmp_path / "report" / "report.md").read_text()


def test_the_demo_runs_over_host_memory(longreach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.evals.demo.pairings", lambda left_out: pairings(["streaming_llm"], left_out))
    asked = ["demo", "--length", 600, "--json"]
    plain, host = (json.loads(longreach(*asked, *more).out)["rows"] for more in ((), ("--host",)))
    for row, other in zip(plain, host, strict=True):
        assert [said["answer"] for said in row["answers"]] == [said["answer"] for said in other["answers"]]
        assert row["decode_reads"] == other["decode_reads"]


def test_what_cannot_be_placed_is_refused(longreach: Any, tiny: Path, document: Path, monkeypatch: Any) -> None:
    refused(longreach(*run(tiny, document, "--device-memory", "1GB")), "--device-memory limits", "give --host")
    short = longreach(*run(tiny, document, "--host", "--device-memory", "1KB"))
    refused(short, "does not hold the 2 staging buffers", "--device-memory")
    evicting = run(tiny, document, "--host", "--evict", "snapkv", text="--documents")
    refused(longreach(*evicting), "evict=snapkv: keys in host memory cannot be evicted")
    specs = ["compare", "--model", tiny, "--document", document, "--host", "--method", "dense evict=snapkv"]
    refused(longreach(*specs), "evict=snapkv: keys in host memory cannot be evicted")
    asked = [
        "eval",
        "--model",
        tiny,
        "--tasks",
        "needles",
        "--length",
        1024,
        "--host",
        "--method",
        "dense evict=snapkv",
    ]
    refused(longreach(*asked), "evict=snapkv: keys in host memory cannot be evicted")
    refused(longreach("demo", "--device-memory", "1GB"), "--device-memory limits", "give --host")
    monkeypatch.setattr("longreach.cache.host.available_bytes", lambda: 1000)
    refused(longreach(*run(tiny, document, "--host")), "of host memory, and 0.98 KiB are free", "Lower the batch")


def test_every_command_that_answers_tells_of_compiling(
    longreach: Any, tiny: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bool, int]] = []

    def tell(cache: Any, device: Any, new: int) -> None:
        told.append((str(device), cache.host, new))

    book = tmp_path / "book.txt"
    book.write_text("The brown hen laid an egg. The fox slept all day long.\n" * 20)
    for name in ("run", "compare", "generation"):
        monkeypatch.setattr(f"longreach.cli.{name}.tell_compiled", tell)
    asked = [
        run(tiny, document, *QUEST, "--host"),
        ["compare", "--model", tiny, "--document", document, "--steps", 3, "--methods", "quest", *QUESTION, "--host"],
        ["generation", "--model", tiny, "--text", book, "--length", 60, "--steps", 5, "--limit", 1, "--host"],
    ]
    for command in asked:
        assert longreach(*command).code == 0
    assert [(device, host) for device, host, _ in told] == [("cpu", True)] * 3 and [n for *_, n in told[1:]] == [4, 5]
