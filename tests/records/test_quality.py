"""The tables of scores of docs/quality.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longreach.records.quality import quality, summary
from tests.records.report import factory


def answers(*scores: float) -> list[dict[str, Any]]:
    return [{"number": number, "score": score} for number, score in enumerate(scores)]


def result(score: float) -> dict[str, Any]:
    return {"score": score, "interval_95": [score / 2, 1.0], "prefill_reads": None, "decode_reads": {"total": 0.25},
            "answers": answers(score)}  # fmt: skip


def test_scores_of_every_method_and_what_is_beyond_the_model(tmp_path: Path) -> None:
    tasks = {
        "easy": {"samples": [0, 1], "results": {"dense": result(1.0), "x k=[0]": result(0.5)}},
        "fair": {"samples": [0], "results": {"dense": result(0.5), "x k=[0]": result(0.25)}},
        "hard": {"samples": [0], "results": {"dense": result(0.0), "x k=[0]": result(0.05)}},
    }
    about = {"config": {"length": 128, "batch": 2}, "device": {"name": "abacus"}, "commit": "c" * 40}
    methods = {"dense": {}, "x k=[0]": {}}
    record = {"kind": "eval", "methods": methods, "tasks": tasks, **about, "model": {"name": "m", "dtype": "float32"}}
    (tmp_path / "a.json").write_text(json.dumps(record))
    (tmp_path / "b.json").write_text(json.dumps({"kind": "bench"}))
    found = quality(tmp_path)
    assert "| `easy` | 100% (50% to 100%) | 50% (25% to 100%) |" in found and "| `hard`" not in found
    assert "| mean of these 2 | 75% | 38% |" in found and "| mean of all 3 | 50% | 27% |" in found
    assert "| bytes read, decode | 25% | 25% |" in found
    assert (
        "2 prompts a task, 2 at a time, abacus, commit cccccccccccc: `a.json`" in found
        and "every method), so without rows: hard;" in found
    )
    assert summary(tmp_path) == "No evaluations yet."  # options of one method beside dense attention
    assert "question read by the method" not in found
    for task in tasks.values():
        task["results"]["y"] = result(0.5)
    methods["y"], about["config"]["question"] = {}, "decode"
    (tmp_path / "a.json").write_text(json.dumps(record))
    short = summary(tmp_path)
    assert "2 at a time, question read by the method, abacus" in short
    assert "| method | mean of 3 tasks |" in short and "| `dense` | 50% | - | 25% | - |" in short
    assert "| `x k=[0]` | 27% | - | 25% | - |" in short  # one prompt tells nothing
    for name, dense, mine in (("easy", 1.0, 0.4), ("fair", 0.5, 0.45), ("hard", 0.0, 0.0)):
        tasks[name]["results"]["dense"]["answers"] = answers(*[dense] * 6)
        # below on 6 prompts of 6; on 5, of which a coin decides as many once in 16 times; on none
        tasks[name]["results"]["x k=[0]"]["answers"] = answers(*[mine] * 5, 0.4 if name == "easy" else dense)
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert "| 25% | easy 50% of 100% |" in summary(tmp_path)
    del tasks["hard"]
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert "| mean | 75% | 38% | 50% |" in quality(tmp_path) and "of all" not in quality(tmp_path)
    methods.update({f"x k=[{n}]": {} for n in range(1, 15)})
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert len(methods) == 17 and quality(tmp_path) == summary(tmp_path) == "No evaluations yet."


def test_records_of_fused_prompts_have_a_row_for_each_method(tmp_path: Path) -> None:
    content = factory.fused()
    labels = {f"dense fuse=a3 fuse.ratio={n}": {**factory.DENSE, "fuse": {"name": "a3", "ratio": n}} for n in range(16)}
    content["methods"] |= labels
    for entry in content["tasks"].values():
        entry["results"] |= dict.fromkeys(labels, entry["results"]["dense fuse=full_reuse"])
    content["tasks"]["qa_1"]["results"]["dense evict=snapkv"]["kept"] = {"right": 0, "kept": 0}
    (tmp_path / "a.json").write_text(json.dumps(content))
    found = quality(tmp_path)
    assert len(content["methods"]) > 16 and found.startswith("| method | `vt` | `qa_1` | mean |")
    assert "| `dense` | 100% (51% to 100%) | 100% (51% to 100%) | 100% |" in found
    assert "| `a3 ratio=0.3` | 75% (30% to 95%), 3 of 4 | 100% (51% to 100%), 4 of 4 | 88% |" in found
    assert "| `dense evict=snapkv` | 25% (5% to 70%), 1 of 4 | 100% (51% to 100%) | 62% |" in found
    assert "Chunks computed behind the system prompt." in found
    assert summary(tmp_path) == "No evaluations yet."
