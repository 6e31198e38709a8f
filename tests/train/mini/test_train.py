"""A few steps on the CPU: the loss falls, the checkpoint is a transformers model, resume goes on from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longreach.adapters.transformers import load
from longreach.errors import InvalidInput, LongreachError, ModelFileError
from longreach.testing.recipe import SHAPE
from longreach.train.mini import checkpoint
from longreach.train.mini.batches import NAMES, batch
from longreach.train.mini.config import SCHEDULES, ModelShape, Schedule
from longreach.train.mini.materials import Materials
from longreach.train.mini.model import Llama
from longreach.train.mini.page import TEXT
from longreach.train.mini.train import LOSSES, Trainer, learning_rate, ratios, train

SCHEDULE = Schedule(
    stages=((0.0, (512,)), (0.5, (1024, 512))), microbatch_tokens=1024, microbatches=2, warmup_steps=3, plain_text=0.0
)


def test_steps_lower_the_loss_of_a_fixed_batch(materials: Materials) -> None:
    torch.manual_seed(0)
    trainer = Trainer(SHAPE, SCHEDULE, "cpu", compile_layers=False)
    fixed = batch(materials, "fixed", 512, 4, 0.0)
    results = [trainer.step([fixed], lr=1e-2) for _ in range(6)]
    answer = [result.losses[0][0] / result.losses[0][1] for result in results if result is not None]
    assert len(answer) == 6 and answer[-1] < 0.9 * answer[0]
    assert results[0] is not None
    right, total = (sum(column) for column in zip(*results[0].forms, strict=True))
    assert len(results[0].forms) == len(NAMES) and total == (fixed.kinds == 3).sum() and 0 <= right <= total


def test_losses_noted_are_means_over_tokens_whatever_the_batches_hold(materials: Materials) -> None:
    torch.manual_seed(0)
    trainer = Trainer(SHAPE, SCHEDULE, "cpu", compile_layers=False)
    text, tasks = batch(materials, "text", 512, 1, 1.0), batch(materials, "tasks", 512, 3, 0.0)
    for batches in ([text, tasks], [text, tasks, tasks]):  # what a batch has none of counts for nothing
        result = trainer.step(batches, lr=0.0)
        assert result is not None
        means = ratios(LOSSES, result.losses)
        assert all(loss == pytest.approx(math.log(SHAPE.vocab_size), rel=0.02) for loss in means.values())
        assert result.losses[1][1] == (text.kinds == TEXT).sum()
    alone = trainer.step([tasks], lr=0.0)
    assert alone is not None and "text" not in ratios(LOSSES, alone.losses)


def test_train_writes_a_transformers_model_and_resumes_from_it(data: Path, tmp_path: Path) -> None:
    # Time budgets say nothing about how many steps a busy machine takes: only what holds after one step is asked.
    out, more = tmp_path / "model", tmp_path / "more"
    options = {"shape": SHAPE, "device": "cpu", "workers": 1, "compile_layers": False}
    said: list[str] = []
    log = train(data, out, minutes=0.03, schedule=SCHEDULE, say=said.append, **options)
    assert log["steps"] >= 1 and log["curve"][0]["forms"] and said[-1].startswith("done")
    assert json.loads((out / "train.json").read_text())["steps"] == log["steps"]
    assert log["device"]["type"] == "cpu" and log["device"]["name"] and {"commit", "dirty", "versions"} <= log.keys()
    assert json.loads((out / "corpus.json").read_text())["overlap_hits"] == 3
    model, tokenizer = load(out)
    ids = torch.tensor([tokenizer("One 1234567.").input_ids])
    assert ids[0, 0] == 1 and torch.isfinite(model(ids).logits).all()
    still = replace(SCHEDULE, peak_lr=0.0, final_lr=0.0)  # what is written is then what was read
    with pytest.raises(LongreachError, match=r"of its schedule, all of the 0\.03 requested; give more --minutes"):
        train(data, more, minutes=0.03, schedule=still, resume=out, **options)
    longer = (log["seconds"] + 1) / 60  # so this is its last second, where sequences are long
    again = train(data, more, minutes=longer, schedule=still, resume=out, say=said.append, **options)
    assert again["steps"] > log["steps"] and again["tokens"] > log["tokens"] and again["seconds"] > log["seconds"]
    first = again["curve"][0]
    assert first["lengths"] == [1024, 512] and log["curve"][0]["lengths"] == [512, 512]
    assert first["step"] == log["steps"] + 1 and first["seconds"] > log["seconds"]
    assert again["resume"]["from"] == str(out) and again["resume"]["steps"] == log["steps"]
    more_still = tmp_path / "more-still"
    begun = train(data, more_still, minutes=0.02, schedule=still, start=more, **options)
    assert begun["curve"][0]["lengths"] == [512, 512] and begun["resume"]["began"] == begun["resume"]["seconds"] > 0
    assert begun["curve"][0]["step"] == again["steps"] + 1 and begun["tokens"] > again["tokens"]
    read, written = (load_file(folder / "model.safetensors") for folder in (out, more_still))
    assert read.keys() == written.keys() and all(torch.equal(read[name], written[name]) for name in read)


def test_going_on_in_the_same_place_keeps_the_log_before(data: Path, tmp_path: Path) -> None:
    options = {"shape": SHAPE, "schedule": SCHEDULE, "device": "cpu", "workers": 1, "compile_layers": False}
    log = train(data, tmp_path, minutes=0.02, **options)
    train(data, tmp_path, minutes=(log["seconds"] + 1) / 60, resume=tmp_path, **options)
    kept = json.loads((tmp_path / f"train-{log['steps']}.json").read_text())
    assert kept["steps"] == log["steps"] and json.loads((tmp_path / "train.json").read_text())["resume"]


def test_resuming_with_another_schedule_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoint.save(Llama(SHAPE), tmp_path, data, checkpoint.Trained(60.0, 7, 900, 30.0, "long"))
    options = {"shape": SHAPE, "device": "cpu", "workers": 1, "compile_layers": False}
    with pytest.raises(LongreachError, match="of the schedule long; go on with --schedule long"):
        train(data, tmp_path / "out", minutes=5, schedule=SCHEDULES["grow"], resume=tmp_path, **options)


def test_going_on_with_another_tokenizer_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoint.save(Llama(SHAPE), tmp_path, data, checkpoint.Trained())
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text() + " ")
    options = {"shape": SHAPE, "schedule": SCHEDULE, "device": "cpu", "workers": 1, "compile_layers": False}
    with pytest.raises(LongreachError, match=r"another tokenizer than .*corpus\.json names"):
        train(data, tmp_path / "out", minutes=0.01, start=tmp_path, **options)


def test_what_cannot_be_read_or_written_is_told_at_once(data: Path, tmp_path: Path) -> None:
    options = {"shape": SHAPE, "schedule": SCHEDULE, "device": "cpu", "workers": 1, "compile_layers": False}
    with pytest.raises(LongreachError, match=r"has no tokenizer\.json, .*manifest\.json; make it with .* --prepare"):
        train(tmp_path, tmp_path / "out", minutes=1, **options)
    (tmp_path / "file").touch()
    with pytest.raises(LongreachError, match=r"cannot write to .*choose another place"):
        train(data, tmp_path / "file" / "out", minutes=1, **options)


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf])
def test_no_minutes(minutes: float, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="minutes: expected a number above 0, got"):
        train(data, tmp_path, minutes=minutes, shape=SHAPE, device="cpu", workers=1, compile_layers=False)


def test_a_full_disk_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(LongreachError, match=r"cannot write a checkpoint to .*No space left.*the one before is whole"):
        train(data, tmp_path, minutes=0.01, shape=SHAPE, schedule=SCHEDULE, device="cpu", workers=1,
              compile_layers=False)  # fmt: skip


def test_the_training_model_is_transformers_llama(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    ours = Llama(SHAPE).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            weight.copy_((weight * 8).bfloat16())  # large enough for attention to matter, exact in the checkpoint
    checkpoint.save(ours, tmp_path, data, checkpoint.Trained())
    theirs, _ = load(tmp_path)
    ids = torch.randint(3, SHAPE.vocab_size, (2, 50))
    with torch.no_grad():
        logits = ours(ids) @ ours.model.embed_tokens.weight.T
        error = (logits - theirs(ids).logits).abs().max() / logits.abs().max()
    assert error < 1e-4  # fp32 rounding through two layers; another RoPE, norm or head order gives over 1e-2


def test_resuming_from_what_training_did_not_write_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoint.save(Llama(SHAPE), tmp_path, data, checkpoint.Trained(61.5, 7, 900, 30.0))
    assert checkpoint.load(Llama(SHAPE), tmp_path) == checkpoint.Trained(61.5, 7, 900, 30.0)
    other = Llama(ModelShape(**{**SHAPE.__dict__, "hidden_size": 48}))
    with pytest.raises(ModelFileError, match="another shape"):
        checkpoint.load(other, tmp_path)
    with pytest.raises(ModelFileError, match=r"no model\.safetensors"):
        checkpoint.load(other, tmp_path / "nowhere")
    weights = {name: w.detach().bfloat16() for name, w in Llama(SHAPE).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")  # as transformers writes it
    with pytest.raises(ModelFileError, match="no record of its training progress"):
        checkpoint.load(Llama(SHAPE), tmp_path)


@pytest.mark.parametrize("noted", ["{", "[1]", '{"epoch": 1}'])
def test_weights_with_another_header_are_refused(noted: str, tmp_path: Path) -> None:
    weights = {name: w.detach().bfloat16() for name, w in Llama(SHAPE).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"training": noted})
    with pytest.raises(ModelFileError, match="no record of its training progress"):
        checkpoint.load(Llama(SHAPE), tmp_path)


def test_half_a_checkpoint_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoint.save(Llama(SHAPE), tmp_path, data, checkpoint.Trained())
    path = tmp_path / "model.safetensors"
    for content in (path.read_bytes()[:5000], b"", b"no weights at all"):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"cannot read .*model\.safetensors"):
            checkpoint.load(Llama(SHAPE), tmp_path)


def test_a_write_that_is_cut_short_leaves_what_was_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(Llama(SHAPE), tmp_path, data, checkpoint.Trained())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    whole = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        whole(path, content[: len(content) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    monkeypatch.setattr(Path, "write_text", lambda path, text: half(path, text.encode()))
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(Llama(SHAPE), tmp_path, data, checkpoint.Trained())
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_cuda_where_there_is_none(data: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(LongreachError, match="no CUDA device"):
        train(data, tmp_path, minutes=1, device="cuda")


def test_learning_rate_warms_up_holds_and_decays() -> None:
    schedule = Schedule()
    assert learning_rate(schedule, 0.0, 0) == pytest.approx(schedule.peak_lr / schedule.warmup_steps)
    assert learning_rate(schedule, 0.3, 10_000) == schedule.peak_lr
    assert learning_rate(schedule, 1.0, 10_000) == pytest.approx(schedule.final_lr)
