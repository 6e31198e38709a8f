"""`longreach eval`: every task on any model directory, records, resuming, bad input in words."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import BatchReader
from longreach.errors import MeasurementFailed, OutOfMemory
from longreach.evals.budgets import DryRun
from longreach.evals.evaluate import Evaluation
from longreach.methods.base import AttentionMethod
from longreach.tasks.registry import FILES, GROUPS, TASKS
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused
from tests.evals.test_evaluate import timeless

ROOM = 2400  # tokens, of a byte each, that hold a sample of every task


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture, a chat template, and room for every task in bytes."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    return save_tiny(folder, family="qwen3", chat=True, max_position_embeddings=ROOM, num_hidden_layers=1)


def asked(model: Path, *more: Any) -> list[Any]:
    return ["eval", "--model", model, "--tasks", "qa_synthetic_1,needle_sweep", "--length", 600, "--samples", 2, *more]


def test_every_task_runs_on_any_model_directory(
    longreach: Any, short_answers: None, other: Path, tmp_path: Path
) -> None:
    record = tmp_path / "out" / "all.json"
    result = longreach("eval", "--model", other, "--tasks", "all,needle_sweep", "--length", ROOM, "--samples", 1,
                       "--method", "dense", "--prefill-chunk-size", 1024, "--output", record)  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(record.read_text())
    assert found["kind"] == "eval" and len(found["tasks"]) == 15 and not list(record.parent.glob("*.journal"))
    for name, task in found["tasks"].items():
        assert name in result.out and task["results"]["dense"]["failed"] == 0
        (sample,) = task["samples"]
        assert 0.8 * ROOM < sample["tokens"] + task["max_new_tokens"] <= ROOM
        assert task["characters_per_token"] == pytest.approx(1.0, abs=0.05)
    assert found["model"]["name"] == "qwen" and len(found["model"]["sha256"]) == 64
    assert found["config"]["length"] == ROOM and "commit" in found and found["methods"]["dense"]


@pytest.mark.usefixtures("short_answers")
def test_the_same_command_twice_and_after_an_interrupt(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = "--method", "streaming_llm window=99", "--method", "oracle_top_k k=0.1 dense_layers=[0]"
    once = json.loads(longreach(*asked(tiny, *methods, "--json")).out)
    record, part = tmp_path / "r.json", Evaluation._part

    def interrupted(self: Any, session: Any, reader: Any, specs: Any, task: Any, prompts: Any) -> Any:
        if task.name == "needle_sweep" and prompts[0].number == 1:
            raise KeyboardInterrupt
        return part(self, session, reader, specs, task, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "_part", interrupted)
        stopped = longreach(*asked(tiny, *methods, "--output", record))
    assert stopped.code == 130 and "r.json.journal: the same command continues" in stopped.err
    journal = tmp_path / "r.json.journal"
    assert not record.exists() and len(journal.read_text().splitlines()) == 4
    refused(longreach(*asked(tiny, *methods, "--output", record, "--seed", 1)), "differs in config", "remove the file")
    result = longreach(*asked(tiny, *methods, "--output", record))
    assert result.code == 0 and "[3] oracle_top_k k=0.1 dense_layers=[0]" in result.out
    assert timeless(json.loads(record.read_text())) == timeless(once) and not journal.exists()
    depths = [s["facts"]["depth"] for s in once["tasks"]["needle_sweep"]["samples"]]
    assert depths == [0.0, 1.0] and next(iter(once["methods"])) == "dense"


@pytest.mark.usefixtures("short_answers")
def test_answers_that_fail_are_an_exit_code_and_asked_again(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, calls, read = tmp_path / "r.json", list[int](), BatchReader.read

    def crashing(self: Any, prompts: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a kernel failed")
        return read(self, prompts)

    monkeypatch.setattr(BatchReader, "read", crashing)
    command = asked(tiny, "--method", "dense", "--output", record)
    result = longreach(*command)
    assert result.code == 3 and "1 answers failed with an error; the same command measures them again" in result.err
    answers = json.loads(record.read_text())["tasks"]["qa_synthetic_1"]["results"]["dense"]["answers"]
    assert [a["error"] for a in answers] == [None, "RuntimeError: a kernel failed"] and answers[1]["score"] == 0
    assert longreach(*command).code == 0 and len(calls) == 4 + 1
    assert json.loads(record.read_text())["tasks"]["qa_synthetic_1"]["results"]["dense"]["failed"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]

    def too_many(self: Any, prompts: Any) -> Any:
        if len(prompts) > 1:
            raise OutOfMemory("too many")
        return read(self, prompts)

    monkeypatch.setattr(BatchReader, "read", too_many)
    result = longreach(*asked(tiny, "--method", "dense", "--batch", 2))
    assert result.code == 0 and "4 answers were computed prompt by prompt, as their batch of 2 failed" in result.out

    def broken(self: Any, prompts: Any) -> Any:
        raise RuntimeError("all is broken")

    monkeypatch.setattr(BatchReader, "read", broken)
    result = longreach(*asked(tiny, "--method", "dense", "--json"))
    assert result.code == 3 and "4 answers failed" in result.err and json.loads(result.out)


@pytest.mark.usefixtures("short_answers")
def test_a_lost_device_is_told_and_nothing_is_lost(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Evaluation._part

    def lost(self: Any, session: Any, reader: Any, specs: Any, task: Any, prompts: Any) -> Any:
        if task.name == "needle_sweep":
            raise MeasurementFailed("the GPU failed inside a kernel")
        return part(self, session, reader, specs, task, prompts)

    monkeypatch.setattr(Evaluation, "_part", lost)
    result = longreach(*asked(tiny, "--method", "dense", "--output", tmp_path / "r.json"))
    assert result.code == 3 and result.out == "" and len(result.err.splitlines()) == 1
    assert "inside a kernel; finished parts are in" in result.err and "continues" in result.err
    assert len((tmp_path / "r.json.journal").read_text().splitlines()) == 1 + 2


def test_a_data_set_is_asked_whole_or_up_to_a_limit(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    lines = [{"_id": f"{i}", "dataset": "hotpotqa", "language": "en", "length": 9, "input": f"What is {i}?",
              "context": f"It is {i}. " * 400, "answers": [f"{i}"], "all_classes": None} for i in range(3)]  # fmt: skip
    (tmp_path / "hotpotqa.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["eval", "--model", tiny, "--tasks", f"longbench={tmp_path / 'hotpotqa.jsonl'}", "--length", 2000,
               "--method", "dense", "--json"]  # fmt: skip
    task = json.loads(longreach(*command).out)["tasks"]["longbench_hotpotqa"]
    assert [s["expected"] for s in task["samples"]] == [["0"], ["1"], ["2"]]
    assert all(s["facts"]["kept"] < 1 and s["tokens"] + task["max_new_tokens"] <= 2000 for s in task["samples"])
    assert len(json.loads(longreach(*command, "--limit", 1).out)["tasks"]["longbench_hotpotqa"]["samples"]) == 1


@pytest.mark.usefixtures("short_answers")
def test_several_lengths_in_one_record_and_report(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "sweep.json"
    result = longreach("eval", "--model", tiny, "--tasks", "needle_sweep", "--length", "1200,600,1200", "--samples", 3,
                       "--method", "streaming_llm", "--output", record)  # fmt: skip
    assert result.code == 0, result.err
    assert result.out.index("-- 1200 tokens") < result.out.index("-- 600 tokens")
    found = json.loads(record.read_text())
    assert found["config"]["length"] == 1200 and found["config"]["lengths"] == [1200, 600]
    for length in (600, 1200):
        task = found["tasks"][f"needle_sweep@{length}"]
        assert (task["task"], task["length"], len(task["samples"])) == ("needle_sweep", length, 3)
        assert all(0.8 * length < s["tokens"] + task["max_new_tokens"] <= length for s in task["samples"])
    pytest.importorskip("matplotlib")
    assert longreach("report", record, "--output", tmp_path / "report").code == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "score by length of the text and depth" in text
    assert "--length 1200,600" in text and "--tasks needle_sweep " in text


def test_records_are_the_same_whoever_makes_the_prompts(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    here = json.loads(longreach(*asked(tiny, "--method", "dense", "--json")).out)
    result = longreach(*asked(tiny, "--method", "dense", "--workers", 1, "--output", record))
    assert result.code == 0 and timeless(json.loads(record.read_text())) == timeless(here)
    assert not multiprocessing.active_children()


def test_memory_of_hash_tables_is_shown(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    """Of all layers with tables; `longreach report` reads the record."""
    record = tmp_path / "r.json"
    method = "magicpig bits=3 tables=9 local=4 seal=4 centre=8 dense_layers=[0]"
    result = longreach("eval", "--model", tiny, "--tasks", "qa_synthetic_1", "--length", 600, "--samples", 1,
                       "--method", method, "--output", record)  # fmt: skip
    assert result.code == 0, result.err
    ((_, task),) = json.loads(record.read_text())["tasks"].items()
    (found,) = (one["sampling"] for one in task["results"].values() if "sampling" in one)
    assert found["layers"] == [1] and "table_share" not in found
    assert f"tables {100 * found['tables_over_kv']:.1f}%" in " ".join(result.out.split())
    assert longreach("report", "--output", tmp_path / "report", record).code == 0


def test_error_bars_are_shown(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    """With rows that were redone; `longreach report` reads records with them and without."""
    record = tmp_path / "r.json"
    method = "magicpig bits=3 tables=9 local=4 seal=4 centre=8 dense_layers=[0] redo=0.2"
    result = longreach("eval", "--model", tiny, "--tasks", "qa_synthetic_1", "--length", 600, "--samples", 1,
                       "--method", method, "--output", record)  # fmt: skip
    assert result.code == 0, result.err
    made = json.loads(record.read_text())
    ((_, task),) = made["tasks"].items()
    ((label, one),) = ((label, one) for label, one in task["results"].items() if "error_bars" in one)
    found = one["error_bars"]
    assert found["layers"] == [1] and found["bytes"] > 0 and found["redone"][0] > 0
    (error,), (redone,) = found["relative_error"], found["redone"]
    words = " ".join(result.out.split())
    assert f"{label}: error {100 * error:.1f}%, redone {100 * redone:.1f}%, bytes {100 * found['bytes']:.1f}%" in words
    assert longreach("report", "--output", tmp_path / "report", record).code == 0
    del one["error_bars"]  # as in older records
    record.write_text(json.dumps(made))
    assert longreach("report", "--output", tmp_path / "older", record).code == 0


def test_the_list_of_tasks(longreach: Any) -> None:
    shown = longreach("eval", "--list").out
    listed = json.loads(longreach("eval", "--list", "--json").out)
    assert [one["name"] for one in listed] == [*TASKS, *(f"{name}=FILE" for name in FILES)]
    assert all(one["name"] in shown and one["source"] for one in listed)
    assert all(f"{group}: {names[0]}" in shown for group, names in GROUPS.items())


@pytest.mark.usefixtures("short_answers")
def test_a_data_set_that_changed_is_another_run(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squad, record = tmp_path / "squad.json", tmp_path / "r.json"

    def write(town: str) -> None:
        paragraphs = [{"context": f"{town} {n} has a mill. " * 9, "qas": [
            {"question": f"Where is mill {n}?", "answers": [{"text": f"{town} {n}"}]}]} for n in range(40)]  # fmt: skip
        squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    write("Town")
    command = ["eval", "--model", tiny, "--tasks", f"qa_1={squad}", "--length", 1500, "--samples", 1, "--method",
               "dense", "--output", record]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "_part", interrupted)
        assert longreach(*command).code == 130
    write("City")
    refused(longreach(*command), "differs in tasks.qa_1", "remove the file")
    write("Town")
    assert longreach(*command).code == 0
    source = json.loads(record.read_text())["tasks"]["qa_1"]["source"]
    assert source.endswith(f"; sha256 {hashlib.sha256(squad.read_bytes()).hexdigest()[:16]}, squad.json")


@pytest.mark.usefixtures("short_answers")
def test_equal_budgets_are_found_said_and_kept(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record, to = tmp_path / "r.json", "omnikv k=0.2 layers=[0]"
    methods = ["--method", to, "--method", "streaming_llm", "--method", "quest", "--method", "oracle_top_k",
               "--method", "less_is_more k=0.5 layers=[0]"]  # fmt: skip
    command = asked(tiny, *methods, "--equal-bytes", to, "--samples", 1, "--output", record)
    result = longreach(*command)
    assert result.code == 0, result.err
    assert "quest is left out: quest reads 100.0% of dense attention's bytes with its least budget" in result.err
    found = json.loads(record.read_text())
    equal = found["equal_bytes"]
    labels = list(found["methods"])
    assert labels[:2] == ["dense", to] and labels[2].startswith("streaming_llm window=0.")
    assert labels[3].startswith("oracle_top_k k=0.") and labels[4] == methods[-1] and len(labels) == 5
    assert equal["to"] == to and list(equal["found"]) == labels[2:4] and list(equal["unreachable"]) == ["quest"]
    assert equal["kept"] == {labels[4]: "its k was given"}
    reads = {label: [task["results"][label]["decode_reads"]["total"] for task in found["tasks"].values()]
             for label in labels}  # fmt: skip
    assert sum(reads[labels[2]]) == pytest.approx(sum(reads[to]), rel=0.02)
    ran = [task["results"][label]["ran"] for task in found["tasks"].values() for label in labels]
    assert all(how["prefill"] == ["reference, sdpa_cpu"] and "numba" in " ".join(how["decode"]) for how in ran)
    assert found["methods"][labels[2]]["decode"]["window"] == equal["found"][labels[2]]["value"]
    said = result.out.split("budgets equal to")[1]
    for label in labels[2:]:
        assert f"{label}" in said and f"measured {sum(reads[label]) / 2:.1%}" in said


@pytest.mark.usefixtures("short_answers")
def test_budgets_that_turn_out_unequal_are_told(longreach: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = DryRun.share

    def wrong(self: DryRun, method: AttentionMethod) -> float:
        return share(self, method) * (1.3 if method.name == "streaming_llm" else 1)

    monkeypatch.setattr(DryRun, "share", wrong)
    to = "omnikv k=0.2 layers=[0]"
    result = longreach(*asked(tiny, "--method", to, "--method", "streaming_llm", "--equal-bytes", to, "--limit", 1))
    (line,) = result.err.splitlines()
    assert result.code == 0 and line.startswith("longreach: streaming_llm window=") and "differ by more than 2%" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tasks", "niah"], ["unknown task 'niah'", "niah_single_1"]),
        (["--tasks", "qa_1"], ["qa_1=PATH", "qa_synthetic_1"]),
        (["--tasks", "longbench=/nowhere.jsonl"], ["/nowhere.jsonl"]),
        (["--length", 5000], ["length 5000", "context of 4096", "--length"]),
        (["--length", 200], ["ask for a longer"]),
        (["--tasks", "cwe", "--length", 1000], ["cwe takes at least", "ask for a longer --length"]),
        (["--method", "quset"], ["unknown decode method 'quset'"]),
        (["--method", "oracle_top_k dense_layers=[9]"], ["dense_layers", "got layer 9"]),
        (["--draws", 3], ["temperature"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--length", "600,0"], ["--length", "at least 1"]),
        (["--length", "600,9000"], ["length 9000", "context of 4096"]),
        (["--samples", 0], ["at least 1"]),
        (["--workers", -1], ["at least 0"]),
        (["--output", "/proc/none/r.json"], ["cannot write /proc/none", "--output"]),
    ],
)
def test_bad_input(longreach: Any, tiny: Path, more: list[Any], words: list[str]) -> None:
    refused(longreach(*asked(tiny, *more)), *words)


def test_a_model_is_needed(longreach: Any) -> None:
    refused(longreach("eval", "--tasks", "vt"), "--model mini")


def test_fusion_eviction_and_controls_in_one_record_and_report(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "fused.json"
    methods = ["dense fuse=a3 evict=snapkv", "dense fuse=random", "dense evict=snapkv evict.capacity=500"]
    command = asked(tiny, *(word for m in methods for word in ("--method", m)), "--chunk-tokens", 100, "--chunks",
                    "bos", "--set", "fuse.ratio=0.05", "--set", "evict.capacity=400", "--output", record)  # fmt: skip
    result = longreach(*command)
    assert result.code == 0, result.err
    found = json.loads(record.read_text())
    labels = ["dense", f"{methods[0]} fuse.ratio=0.05 evict.capacity=400", f"{methods[1]} fuse.ratio=0.05", methods[2]]
    assert list(found["methods"]) == labels and all(label in result.out for label in labels)
    assert found["methods"][labels[1]]["fuse"] == {"name": "a3", "ratio": 0.05, "heads": "each"}
    why = found["bytes_compared_with"]
    assert "rows that ran, not for the whole prompt" in why and "over the kept keys" in why
    assert found["methods"][labels[1]]["evict"]["capacity"] == 400 and "fuse" not in found["methods"]["dense"]
    assert (found["config"]["chunk_tokens"], found["config"]["chunks"]) == (100, "bos")
    assert found["tasks"]["needle_sweep"]["results"][labels[2]]["fusion"]["recomputed"] > 10
    told = longreach("report", record, "--output", tmp_path / "report")
    assert told.code == 0 and "--chunk-tokens 100 --chunks bos" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method", "dense fuse=a4"], ["unknown fuse method 'a4'", "dependence, random, oracle, row_order"]),
        (["--method", "streaming_llm/dense fuse=a3"], ["fuse=a3 with prefill=streaming_llm"]),
        (["--method", "mac evict=snapkv"], ["evict=snapkv with decode=mac"]),
        (["--chunks", "bos"], ["--chunks is for methods that fuse"]),
        (["--chunk-ends", "tokens"], ["--chunk-ends is for prompts that are cut into chunks"]),
        (["--set", "fuse.ratio=0.3"], ["no method given has this option in its fuse slot"]),
        (["--set", "decode.k=1"], ["unknown slot in --set 'decode'", "known: fuse, evict"]),
        (["--method", "dense fuse=a3", "--equal-bytes", "quest"], ["--equal-bytes finds budgets over all keys"]),
    ],
)
def test_fusion_that_cannot_be_is_refused(longreach: Any, tiny: Path, more: list[str], words: list[str]) -> None:
    refused(longreach(*asked(tiny), *more), *words)
