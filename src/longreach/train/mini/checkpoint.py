"""Checkpoints as transformers reads them: model.safetensors in bf16, config.json, the tokenizer's files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from longreach.errors import ModelFileError
from longreach.train.mini.model import Llama

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def save(model: Llama, folder: Path, data: Path) -> None:
    """Write a complete model directory; each file is replaced at once, so that a reader never sees half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: w.detach().to(device="cpu", dtype=torch.bfloat16).contiguous() for name, w in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors.part", metadata={"format": "pt"})
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.shape.to_transformers(), indent=1) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(data / name, folder / name)


def load_weights(model: Llama, folder: Path) -> None:
    """Fill the model from a checkpoint of the same shape.

    Raises:
        ModelFileError: no such file, or weights of another shape.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelFileError(f"{folder} has no model.safetensors to resume from")
    weights = load_file(path)
    expected = {name: tuple(w.shape) for name, w in model.state_dict().items()}
    if {name: tuple(w.shape) for name, w in weights.items()} != expected:
        raise ModelFileError(f"{path} holds a model of another shape; resume from one with this recipe's shape")
    model.load_state_dict({name: w.float() for name, w in weights.items()})
