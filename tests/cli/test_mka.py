"""`longreach mka`: convert, index, train; the folders they write are models for every other verb."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.adapters.transformers import load, save
from longreach.adapters.transformers.mka import convert
from longreach.cli.mka.train import Rows
from longreach.testing.tiny import save_tiny, tiny_model, tiny_tokenizer
from longreach.train.mka.budgets import levels_of
from tests.cli.test_bad_input import refused

HEAL = ["--steps", 4, "--lengths", "40,60", "--batch-tokens", 120, "--accumulate", 1]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    path.write_text("".join(f"{n} hens laid {n * n} eggs, and {n % 7} of them were brown.\n" for n in range(60)))
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of these tests with FastMKA, away from gate 0."""
    folder = tmp_path_factory.mktemp("models") / "fast"
    torch.manual_seed(0)
    save(convert(tiny_model("llama", eos_token_id=258), "fastmka", gate=0.5), tiny_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "block"
    torch.manual_seed(0)
    options: dict[str, Any] = {"recall": "index", "block": 8, "window": 16, "blocks": 3, "features": 8}
    save(convert(tiny_model("llama", eos_token_id=258), "block_mka", **options), tiny_tokenizer(), folder)
    return folder


def test_convert_writes_a_model_that_equals_the_original(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "fast"
    measured = ["--text", book, "--length", 100, "--prompts", 2]
    result = longreach("mka", "convert", tiny, "fastmka", "--out", out, *measured, "--layers", 1, "decay=0.9")
    assert result.code == 0, result.err
    assert (
        "fast: tiny as fastmka, +" in result.out
        and "Equal to the original bit for bit, checked on 2 windows of" in (" ".join(result.out.split()))
    )
    record = json.loads((out / "conversion.json").read_text())
    assert record["distance"]["identical"] and record["distance"]["kl"] == 0 and record["layers"] == [1]
    assert record["given"] == {"decay": 0.9} and record["options"]["decay"] == 0.9
    model, tokenizer = load(out)
    assert list(levels_of(model)) == [1] and tokenizer("a").input_ids
    again = longreach("mka", "convert", tiny, "fastmka", "--out", out, *measured)
    refused(again, "exists and is not an empty folder")
    monkeypatch.setattr("longreach.train.mka.distance.states_of", lambda *_: pytest.fail("the model reads"))
    refused(longreach("mka", "convert", out, "fastmka", "--out", tmp_path / "twice", *measured), "revert it first")


def test_mka_equals_the_original_and_block_mka_where_it_covers_the_context(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path
) -> None:
    def distance(name: str, variant: str, *options: str) -> dict[str, Any]:
        measured = ["--text", book, "--length", 120, "--prompts", 1, "--json"]
        result = longreach("mka", "convert", tiny, variant, *options, "--out", tmp_path / name, *measured)
        assert result.code == 0, result.err
        found: dict[str, Any] = json.loads(result.out)["distance"]
        return found

    assert distance("mka", "mka", "block=8", "window=16")["identical"]
    assert distance("all", "block_mka")["kl"] < 1e-6  # a window of 512 keys
    few = distance("few", "block_mka", "block=8", "window=16", "blocks=1")
    assert few["kl"] > 0.01 and not few["identical"]


def test_convert_makes_baselines_and_prints_their_distance(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    result = longreach("mka", "convert", tiny, "mqa", "--out", tmp_path / "mqa", "--length", 600, "--prompts", 1)
    assert result.code == 0 and "KL 1.9" in result.out and "same first choice for" in result.out
    assert "1 prompt of each of niah_single_2" in result.out and "(original 8" in " ".join(result.out.split())
    shown = longreach("mka", "convert", tiny, "gqa", "kv_heads=2", "--out", tmp_path / "gqa", "--length", 600,
                      "--tasks", "niah_single_2", "--prompts", 1, "--json")  # fmt: skip
    record = json.loads(shown.out)
    assert record["distance"]["kl"] == pytest.approx(0, abs=1e-9) and record["given"] == {"kv_heads": 2}
    assert (tmp_path / "gqa" / "model.safetensors").is_file() and record["out"] == str(tmp_path / "gqa")


def test_a_baseline_is_healed_like_a_variant(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    folder, measured = tmp_path / "mla", ["--text", book, "--length", 100, "--prompts", 2]
    assert longreach("mka", "convert", tiny, "mla", "--out", folder, *measured).code == 0
    train = ["mka", "train", folder, "--teacher", tiny, "--text", book, *HEAL, "--learning-rate", 2e-3]
    result = longreach(*train, "--out", tmp_path / "healed", "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["after"]["kl"] < record["before"]["kl"]
    assert json.loads((tmp_path / "healed" / "conversion.json").read_text())["variant"] == "mla"
    refused(longreach(*train, "--train", "levels", "--out", tmp_path / "none"), "the model has no such parameters")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fastmkb"], ["unknown variant 'fastmkb'", "known: fastmka, mka, block_mka, mha, gqa, mqa, mla"]),
        (["block_mka", "windw=3"], ["option of block_mka 'windw'", "known: tiers, block, window"]),
        (["block_mka", "window=100"], ["multiple of block=64, got 100"]),
        (["fastmka", "decay"], ["'decay': expected OPTION=VALUE"]),
        (["fastmka", "decay=0.5", "decay=0.6"], ["decay is set twice"]),
        (["fastmka", "decay=2.0"], ["decay: expected a float from 3.1e-07"]),
        (["block_mka", "tiers=3"], ["tiers: expected a list", "such as [1, 3], got 3"]),
        (["block_mka", "tiers=1,3"], ["tiers: expected a list", "such as [1, 3], got '1,3'"]),
        (["block_mka", "share=0"], ["share: expected layer numbers, ascending, such as [0, 2], got 0"]),
        (["fastmka", "layers=0", "--layers", "1"], ["layers=0 and --layers: expected one of them"]),
        (["fastmka", "routing=top2"], ["top2 keeps two levels"]),
        (["gqa"], ["kv_heads: gqa needs a number of KV heads"]),
        (["fastmka", "--layers", "0,7"], ["layers", "7"]),
        (["fastmka", "--layers", "one"], ["whole numbers of at least 0"]),
        (["mqa", "kv_heads=1"], ["option of mqa 'kv_heads'", "known: none"]),
        (["mqa", "--layers", "0"], ["mqa replaces the attention of all layers"]),
        (["fastmka", "--length", "99999"], ["at most 4096 tokens"]),
        (["fastmka", "--tasks", "niah_single_2", "--length", "100"], ["takes at least"]),
        (["fastmka", "--length", "100"], ["none of the tasks", "fits 100 tokens"]),
        (["fastmka", "--tasks", "poems"], ["unknown task 'poems'"]),
        (["fastmka", "--text", "missing.txt"], ["cannot read missing.txt"]),
    ],
)
def test_convert_refuses(longreach: Any, tiny: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    refused(longreach("mka", "convert", tiny, *arguments, "--out", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_what_is_no_model(longreach: Any, tmp_path: Path) -> None:
    refused(longreach("mka", "convert", tmp_path / "none", "fastmka", "--out", tmp_path / "out"), "no model directory")


def test_train_heals_and_other_verbs_read_the_folder(
    longreach: Any, tiny: Path, converted: Path, book: Path, tmp_path: Path, short_answers: None
) -> None:
    out = tmp_path / "healed"
    result = longreach("mka", "train", converted, "--teacher", tiny, "--out", out, "--text", book, *HEAL,
                       "--learning-rate", 2e-3)  # fmt: skip
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].split()[:4] == ["step", "seconds", "loss", "KL"]
    assert [line.split()[0] for line in result.out.splitlines()[1:3]] == ["1", "4"]
    assert "before: KL" in result.out and "after: KL" in result.out and f"{out}: 4 steps, " in result.out
    record = json.loads((out / "training.json").read_text())
    assert record["after"]["kl"] < record["before"]["kl"] and record["teacher"]["name"] == "tiny"
    assert record["sources"][0]["texts"][0]["name"] == "book.txt" and record["complete"]
    assert len((out / "training.jsonl").read_text().splitlines()) == 4
    asked = longreach("eval", "--model", out, "--tasks", "niah_single_2", "--length", 600, "--limit", 1,
                      "--method", "dense", "--json")  # fmt: skip
    assert asked.code == 0 and json.loads(asked.out)["model"]["name"] == "healed"


def test_small_gradients_fit_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    Rows().add(1, {"seconds": 0, "loss": 1.0, "kl": 1.0, "nll": 2.0, "grad_norm": 2.8e-5, "rate": 1.0,
                   "tokens_per_second": 10, "gates": [0.5]})  # fmt: skip
    assert "2.8e-05" in capsys.readouterr().out


def test_train_on_tasks_without_a_teacher(longreach: Any, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "healed"
    result = longreach("mka", "train", converted, "--out", out, "--steps", 1, "--lengths", 600, "--batch-tokens", 600,
                       "--accumulate", 1, "--train", "levels", "--json")  # fmt: skip
    assert result.code == 0, result.err
    left_out = "niah_multikey_1, niah_multikey_3, niah_multivalue, niah_multiquery, vt, cwe, fwe"
    assert result.err == f"longreach: these tasks do not fit and are left out: {left_out}\n"
    record = json.loads(result.out)
    (source,) = record["sources"]
    assert source["tasks"] == ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2"]
    assert record["options"]["nll"] == 1.0 and record["options"]["kl"] == 0.0 and record["teacher"] is None


def test_ctrl_c_leaves_a_model_and_a_training_to_resume(
    longreach: Any, tiny: Path, converted: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add = tmp_path / "healed", Rows.add

    def interrupted(rows: Rows, step: int, line: dict[str, Any]) -> None:
        add(rows, step, line)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    command = ["mka", "train", converted, "--teacher", tiny, "--out", out, "--text", book, *HEAL]
    monkeypatch.setattr(Rows, "add", interrupted)
    result = longreach(*command)
    assert result.code == 130
    assert result.err == f"longreach: interrupted; step 2 is saved in {out}; --resume continues from there\n"
    model, _ = load(out)  # a model as it is
    assert levels_of(model) and json.loads((out / "training.json").read_text())["complete"] is False
    monkeypatch.setattr(Rows, "add", add)
    refused(longreach(*command), "holds an unfinished training; continue it with --resume")
    refused(longreach(*command, "--resume", "--seed", 3), "other seed; resume with the same")
    done = longreach(*command, "--resume")
    assert done.code == 0 and json.loads((out / "training.json").read_text())["steps"] == 4
    whole = tmp_path / "whole"
    command[command.index(out)] = whole
    assert longreach(*command).code == 0
    assert (whole / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--teacher", "{other}"], ["has another vocabulary"]),
        (["--teacher", "{none}"], ["no model directory"]),
        (["--lengths", "5000"], ["at most 4096 tokens", "got 5000"]),
        (["--lengths", "1"], ["whole numbers of at least 2"]),
        (["--text", "{empty}"], ["is empty"]),
        (["--tasks", "poems"], ["unknown task 'poems'"]),
        (["--data", "{none}"], ["has no tokenizer.json"]),
        (["--kl", "0"], ["expected a weight above 0"]),
        (["--draw-budget", "8"], ["WINDOW:BLOCKS"]),
        (["--draw-budget", "64:2"], ["recalls no blocks"]),
        (["--learning-rate", "0"], ["learning_rate"]),
        (["--resume", "--out", "{full}"], ["has no training-state.safetensors to resume from"]),
        (["--train", "gates"], ["--train"]),
    ],
)
def test_train_refuses(
    longreach: Any, tiny: Path, converted: Path, book: Path, tmp_path: Path, change: list[str], words: list[str]
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    if "{other}" in change:
        save_tiny(tmp_path / "other", vocab_size=300)
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["hello"])
        tokenizer.save_pretrained(tmp_path / "other")
    given = [part.format(other=tmp_path / "other", none=tmp_path / "none", empty=tmp_path / "empty.txt",
                         full=tmp_path) for part in change]  # fmt: skip
    known = {"--teacher": tiny, "--text": book, "--steps": 4, "--lengths": "40"}
    command = [part for name, value in known.items() if name not in given for part in (name, value)]
    out = [] if "--out" in given else ["--out", tmp_path / "out"]
    refused(longreach("mka", "train", converted, *out, *command, *given), *words)


def test_train_wants_a_converted_model_and_one_budget(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    command = ["mka", "train", tiny, "--teacher", tiny, "--out", tmp_path / "out"]
    refused(longreach(*command, "--steps", 1), "is no converted model; convert it first: longreach mka convert")
    refused(longreach(*command), "--steps --minutes")
    refused(longreach(*command, "--steps", 1, "--minutes", 1), "not allowed with")


def test_a_model_equal_to_its_teacher_learns_nothing(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    folder = tmp_path / "equal"
    save(convert(load(tiny)[0], "fastmka"), tiny_tokenizer(), folder)
    result = longreach("mka", "train", folder, "--teacher", tiny, "--out", tmp_path / "out", "--text", book, *HEAL)
    assert result.code == 0 and result.err.startswith("longreach: warning: model and teacher give the same")


def test_index_is_distilled_and_compared(longreach: Any, indexed: Path, book: Path, tmp_path: Path) -> None:
    (indexed / "conversion.json").write_text('{"variant": "block_mka"}')
    out = tmp_path / "indexed"
    command = ["mka", "index", indexed, "--text", book, "--length", 200, "--prompts", 8, "--steps", 3, "--rows", 8]
    result = longreach(*command, "--out", out)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:5] == ["layer", "far", "before", "after", "oracle"] and "chance" in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "all"] and "2 prompts that were not" in result.out
    record = json.loads((out / "index.json").read_text())
    assert record["before"]["counts"] == [3, 4, 8] and record["tokens"] == 1200
    assert json.loads((out / "conversion.json").read_text()) == {"variant": "block_mka"}
    before, after = (levels_of(load(folder)[0])[0].index.up for folder in (indexed, out))
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("tiny", [], ["was not converted"]),
        ("converted", [], ["has no index to distil"]),
        ("indexed", ["--length", 50], ["too short", "raise --length"]),
        ("indexed", ["--prompts", 1], ["one prompt is too few"]),
        ("indexed", ["--learning-rate", 0], ["learning rate above 0"]),
        ("indexed", ["--out", "{indexed}"], ["not an empty folder"]),
    ],
)
def test_index_refuses(
    longreach: Any, request: pytest.FixtureRequest, book: Path, tmp_path: Path, model: str, change: list[Any],
    words: list[str],
) -> None:  # fmt: skip
    folder = request.getfixturevalue(model)
    given = [str(part).format(indexed=folder) for part in change]
    known = {"--out": tmp_path / "out", "--text": book, "--length": 200, "--prompts": 4, "--steps": 1}
    command = [part for name, value in known.items() if name not in given for part in (name, value)]
    refused(longreach("mka", "index", folder, *command, *given), *words)


@pytest.mark.sweep
def test_the_shipped_model_converted_healed_and_asked(longreach: Any, tmp_path: Path) -> None:
    """20 steps at 512 tokens and an evaluation, in minutes on a CPU."""
    folder, healed = tmp_path / "converted", tmp_path / "healed"
    started = time.process_time()  # not of other processes on the machine
    small = ["block=16", "window=64", "blocks=4", "--length", 512, "--prompts", 1]
    assert longreach("mka", "convert", "mini", "block_mka", *small, "--out", folder).code == 0
    trained = longreach("mka", "train", folder, "--teacher", "mini", "--out", healed, "--steps", 20, "--lengths", 512,
                        "--batch-tokens", 512, "--accumulate", 1, "--learning-rate", 1e-5, "--json")  # fmt: skip
    assert trained.code == 0, trained.err
    record = json.loads(trained.out)
    assert record["steps"] == 20 and record["after"]["tokens"] == record["before"]["tokens"]
    for loss in ("kl", "nll"):  # a small step towards the teacher: KL falls from 0.161 to 0.158 nats a token
        assert record["after"][loss] < record["before"][loss]
    asked = longreach("eval", "--model", healed, "--tasks", "niah_single_1", "--length", 512, "--samples", 2,
                      "--method", "dense", "--json")  # fmt: skip
    assert asked.code == 0, asked.err
    assert time.process_time() - started < 180
