"""A few steps on the CPU: the loss falls, the checkpoint is a transformers model, resume goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longreach.adapters.transformers import load
from longreach.errors import LongreachError, ModelFileError
from longreach.testing.recipe import SHAPE
from longreach.train.mini import checkpoint
from longreach.train.mini.config import ModelShape, Schedule
from longreach.train.mini.model import Llama
from longreach.train.mini.train import learning_rate, train

SCHEDULE = Schedule(stages=((0.0, (256,)), (0.5, (512, 256))), microbatch_tokens=1024, microbatches=2, warmup_steps=3)


def test_smoke_training_and_resume(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    options = {"shape": SHAPE, "schedule": SCHEDULE, "device": "cpu", "workers": 1, "compile_layers": False}
    said: list[str] = []
    log = train(data, out, minutes=0.08, say=said.append, dev_batches=1, dev_every=2, **options)
    assert log["steps"] > 3 and said[-1].startswith("done")
    assert log["curve"][-1]["loss"] < log["curve"][0]["loss"]
    assert json.loads((out / "train.json").read_text())["steps"] == log["steps"]
    model, tokenizer = load(out)
    ids = torch.tensor([tokenizer("One 1234567.").input_ids])
    assert ids[0, 0] == 1 and torch.isfinite(model(ids).logits).all()
    again = train(data, tmp_path / "more", minutes=0.02, resume=out, say=said.append, dev_batches=1, **options)
    assert again["resume"] == str(out) and again["curve"][0]["loss"] < log["curve"][0]["loss"]


def test_the_training_model_is_transformers_llama(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    ours = Llama(SHAPE).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            weight.copy_((weight * 8).bfloat16())  # large enough for attention to matter, exact in the checkpoint
    checkpoint.save(ours, tmp_path, data)
    theirs, _ = load(tmp_path)
    ids = torch.randint(3, SHAPE.vocab_size, (2, 50))
    with torch.no_grad():
        logits = ours(ids) @ ours.model.embed_tokens.weight.T
        error = (logits - theirs(ids).logits).abs().max() / logits.abs().max()
    assert error < 1e-4  # fp32 rounding through two layers; another RoPE, norm or head order gives over 1e-2


def test_resuming_from_another_shape_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoint.save(Llama(SHAPE), tmp_path, data)
    other = Llama(ModelShape(**{**SHAPE.__dict__, "hidden_size": 48}))
    with pytest.raises(ModelFileError, match="another shape"):
        checkpoint.load_weights(other, tmp_path)
    with pytest.raises(ModelFileError, match=r"no model\.safetensors"):
        checkpoint.load_weights(other, tmp_path / "nowhere")


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
