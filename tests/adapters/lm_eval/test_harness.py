"""The harness itself, on tasks in local files, without a network."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longreach.adapters import lm_eval as adapter
from longreach.adapters.lm_eval.__main__ import main
from longreach.testing.tiny import save_tiny
from tests.adapters.lm_eval.requests import STREAMING, ours, plain

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    """Whoever made a model, the harness too: once it is gone, so is what it put into transformers."""
    yield
    gc.collect()
    assert "longreach" not in ALL_ATTENTION_FUNCTIONS.valid_keys()


ROWS = [{"asked": f"{a} plus {b} is", "choices": [f" {a + b}", f" {a - b}", " blue"]} for a in range(4) for b in (5, 2)]
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["zz"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{asked}}{{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on one JSONL file. YAML reads JSON."""
    path = tmp_path_factory.mktemp("tasks")
    data = path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    for name, fields in TASKS.items():
        source = {"data_files": {"test": str(data)}, "cache_dir": str(path / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test",
                "doc_to_text": "" if name == "local_text" else "{{asked}}", **fields}  # fmt: skip
        (path / f"{name}.yaml").write_text(json.dumps(task))
    return path


def evaluate(model: Any, folder: Path, **options: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True, **options
    )
    assert found is not None
    return found


def responses(found: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [sample["filtered_resps"] for sample in found["samples"][name]] for name in TASKS}


def test_dense_results_are_those_of_the_harnesss_own_model(folder: Path) -> None:
    expected = evaluate(plain(), folder)
    with ours() as lm:
        found = evaluate(lm, folder)
    mine, theirs = responses(found), responses(expected)
    assert mine["local_answer"] == theirs["local_answer"]
    scores, truth = ([float(s) for row in r["local_choice"] for s, _ in row] for r in (mine, theirs))
    assert len(scores) == 3 * len(ROWS) and scores == pytest.approx(truth, rel=1e-4)
    assert found["results"]["local_choice"]["acc,none"] == expected["results"]["local_choice"]["acc,none"]
    perplexities = [f["results"]["local_text"]["word_perplexity,none"] for f in (found, expected)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-3)


def test_results_say_what_ran_and_what_it_read(folder: Path) -> None:
    with ours(decode=STREAMING, scoring="decode") as lm:
        about = evaluate(lm, folder)["config"]["longreach"]
    assert about["prefill"] == {"name": "dense"} and about["scoring"] == "decode"
    assert about["decode"] == {"name": "streaming_llm", "sinks": 2, "window": 4}
    assert about["reads_over_dense"]["prefill"] == 1.0 and about["reads_over_dense"]["decode"] < 0.9
    json.dumps(about)


def test_it_is_registered_by_name(folder: Path, tmp_path: Path) -> None:
    arguments = {"pretrained": str(save_tiny(tmp_path / "model")), "decode": "oracle_top_k k=0.5 dense_layers=[0]"}
    found = evaluate("longreach", folder, model_args=arguments, device="cpu", batch_size=4)
    assert found["config"]["longreach"]["decode"]["dense_layers"] == (0,)
    assert found["config"]["model_num_parameters"] > 0
    assert lm_eval.api.registry.get_model("longreach") is adapter.LongreachLM


@pytest.fixture
def local_tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command reads the files of the harness's own thousands of tasks otherwise."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))


def test_the_command_ends_in_a_line_where_it_cannot(
    local_tasks_only: None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["lm-eval", "run", "--model", "longreach", "--include_path", str(folder), "--tasks", "local_choice"]
    monkeypatch.setattr(sys, "argv", [*words, "--model_args", f"pretrained={tmp_path / 'none'}"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("longreach: no model directory at")


def test_the_command_runs_a_task(
    local_tasks_only: None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = save_tiny(tmp_path / "model")
    words = ["lm-eval", "run", "--model", "longreach", "--include_path", str(folder), "--tasks", "local_choice"]
    given = f"pretrained={model},decode=oracle_top_k k=0.5 dense_layers=[0,1],scoring=decode"
    monkeypatch.setattr(sys, "argv", [*words, "--model_args", given, "--batch_size", "4", "--device", "cpu"])
    assert main() == 0
    assert "local_choice" in capsys.readouterr().out
