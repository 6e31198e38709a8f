"""What does not belong together, or is not whole, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.mini.card.conftest import FIRST, LAST, Made

from longreach.errors import InvalidInput, LongreachError, ModelFileError
from longreach.testing.recipe import SHAPE
from longreach.train.mini import checkpoint
from longreach.train.mini.card.inputs import read
from longreach.train.mini.checkpoint import Trained
from longreach.train.mini.model import Llama


def test_runs_are_a_chain_and_rows_those_of_dense(made: Made) -> None:
    found = read(made.model, made.logs, made.records)
    assert [(run.begun.steps, run.ended.steps) for run in found.runs] == [(0, 100), (100, 500)]
    assert [run.longest for run in found.runs] == [512, 1024] and found.lengths == [512, 1024]
    assert found.at("vt", 1024) is not None and found.at("fwe", 1024) is None and len(found.rows) == 14


def test_a_run_that_was_interrupted_ends_where_the_next_began(made: Made) -> None:
    made.edit(made.logs[0], lambda log: {k: v for k, v in log.items() if k not in ("steps", "tokens", "seconds")})
    assert read(made.model, made.logs, made.records).runs[0].ended == FIRST
    made.edit(made.logs[0], lambda log: log["curve"][-1].update(step=101))
    with pytest.raises(InvalidInput, match=r"train-1\.json is cut short"):
        read(made.model, made.logs, made.records)


def drop(name: str) -> Callable[[Any], Any]:
    return lambda content: {k: v for k, v in content.items() if k != name}


def change(**fields: Any) -> Callable[[Any], Any]:
    return lambda content: content.update(fields)


def lose_an_answer(record: Any) -> None:
    record["tasks"]["vt"]["results"]["dense"]["answers"].pop()


def rename_dense(record: Any) -> None:
    record["methods"]["quest"] = record["methods"].pop("dense")
    record["methods"]["quest"]["decode"]["name"] = "quest"
    for task in record["tasks"].values():
        task["results"]["quest"] = task["results"].pop("dense")


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("logs", drop("steps"), r"train-2\.json is cut short \(steps is missing\)"),
        ("logs", drop("commit"), r"train-2\.json: commit is missing; .*this version"),
        ("logs", change(curve=[]), r"train-2\.json: curve: expected at least 1"),
        ("logs", change(steps=400), r"ended at step 400, and the weights in .* are of step 500"),
        ("logs", change(resume=None), r"train-2\.json is of a run that began at step 0, .*ended at step 100"),
        ("logs", lambda log: log["shape"].update(hidden_size=64), r"another model .*hidden_size 64 instead of 32"),
        ("records", lambda r: r["model"].update(sha256="0" * 64), r"ruler-2\.json is of another model: .*000000000000"),
        ("records", change(format=2), r"ruler-2\.json is of format 2"),
        ("records", change(kind="bench"), r"ruler-2\.json is a record of kind 'bench'"),
        ("records", drop("tasks"), r"ruler-2\.json: tasks is missing"),
        ("records", lose_an_answer, r"ruler-2\.json is cut short: vt has 3 of 4 answers"),
        ("records", rename_dense, r"ruler-2\.json has no results of dense"),
        ("records", lambda r: r["config"].update(length=512), r"both hold vt at 512 tokens"),
    ],
)
def test_logs_and_records_that_do_not_belong(made: Made, file: str, spoil: Callable[[Any], Any], message: str) -> None:
    made.edit(getattr(made, file)[1], spoil)
    with pytest.raises(InvalidInput, match=message):
        read(made.model, made.logs, made.records)


@pytest.mark.parametrize("file", ["logs", "records"])
def test_files_that_are_missing_or_broken(made: Made, file: str) -> None:
    path: Path = getattr(made, file)[0]
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InvalidInput, match=rf"{path.name} is no .*JSON"):
        read(made.model, made.logs, made.records)
    path.write_text("[]")
    with pytest.raises(InvalidInput, match=path.name):
        read(made.model, made.logs, made.records)
    path.unlink()
    with pytest.raises(InvalidInput, match=rf"cannot read .*{path.name}"):
        read(made.model, made.logs, made.records)
    setattr(made, file, [])
    with pytest.raises(InvalidInput, match=r"no (training logs|records)"):
        read(made.model, made.logs, made.records)


def test_logs_in_another_order_or_not_all(made: Made) -> None:
    with pytest.raises(InvalidInput, match=r"train-2\.json is of a run that began at step 100, and a first run"):
        read(made.model, made.logs[::-1], made.records)
    with pytest.raises(InvalidInput, match=r"logs of later runs are missing"):
        read(made.model, made.logs[:1], made.records)


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("config.json", drop("hidden_size"), "hidden_size is missing"),
        ("corpus.json", drop("sources"), r"sources is missing; .*manifest\.json"),
        ("corpus.json", lambda c: c["sources"][0].pop("licence") and None, r"sources\[0\]\.licence is missing"),
        ("corpus.json", change(tokens={"prose": "many"}), r"tokens\.prose: expected a number"),
        ("corpus.json", change(haystack_sha256="00"), "another haystack"),
    ],
)
def test_a_models_files(made: Made, file: str, spoil: Callable[[Any], Any], message: str) -> None:
    made.edit(made.model / file, spoil)
    with pytest.raises(ModelFileError, match=message):
        read(made.model, made.logs, made.records)
    (made.model / file).unlink()
    with pytest.raises(ModelFileError, match=rf"cannot read .*{file}"):
        read(made.model, made.logs, made.records)


def test_other_weights(made: Made, data: Path) -> None:
    corpus = (made.model / "corpus.json").read_text()
    torch.manual_seed(1)
    checkpoint.save(Llama(SHAPE), made.model, data, LAST)
    (made.model / "corpus.json").write_text(corpus)
    with pytest.raises(InvalidInput, match="of another model"):
        read(made.model, made.logs, made.records)
    (made.model / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelFileError, match=r"cannot read .*safetensors"):
        read(made.model, made.logs, made.records)
    (made.model / "model.safetensors").unlink()
    with pytest.raises(LongreachError, match=r"cannot read .*safetensors"):
        read(made.model, made.logs, made.records)


def test_weights_that_do_not_say_how_far_they_came(made: Made) -> None:
    from safetensors.torch import load_file, save_file

    path = made.model / "model.safetensors"
    save_file(load_file(path), path, metadata={"training": json.dumps({"epochs": 3})})
    with pytest.raises(ModelFileError, match="no record of its training progress"):
        read(made.model, made.logs, made.records)
    assert Trained() != LAST
