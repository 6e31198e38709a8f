"""Checkpoints as transformers reads them: model.safetensors in bf16, config.json, the tokenizer's files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from longreach.errors import ModelFileError
from longreach.train.mini.model import Llama

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CORPUS = "corpus.json"  # in a model's folder: its training data, as `prepare` wrote it
MANIFEST = "manifest.json"  # the same, in the folder of the training data
DATA_FILES = (*TOKENIZER_FILES, "prose.bin.xz", "code.bin.xz", "words.json", MANIFEST)  # what `prepare` writes
LOG = "train.json"  # in a model's folder: the log of its last run


@dataclass(frozen=True)
class Trained:
    """How far training has come: seconds, updates, tokens seen.

    began: seconds at which its schedule began. schedule: that one's name, where it has one.
    """

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    began: float = 0.0
    schedule: str | None = None


def save(model: Llama, folder: Path, data: Path, done: Trained) -> None:
    """Write a complete model directory; each file is replaced at once, so that a reader never gets half of one.

    done: noted in the weights' header, for `load` to go on from. The weights come last: where they are, all is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "config.json", (json.dumps(model.shape.to_transformers(), indent=1) + "\n").encode())
    for source, name in ((MANIFEST, CORPUS), *((name, name) for name in TOKENIZER_FILES)):
        replace(folder / name, (data / source).read_bytes())
    weights = {
        name: w.detach().to(device="cpu", dtype=torch.bfloat16).contiguous() for name, w in model.state_dict().items()
    }
    header = {"format": "pt", "training": json.dumps(asdict(done))}
    save_file(weights, folder / "model.safetensors.part", metadata=header)
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")


def replace(path: Path, content: bytes) -> None:
    """Write a file at once: whoever is killed while writing leaves the old one."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


def other_tokenizer(folder: Path, data: Path) -> bool:
    """Whether a checkpoint has a tokenizer, and not that of the training data."""
    kept, used = (place / TOKENIZER_FILES[0] for place in (folder, data))
    return kept.is_file() and kept.read_bytes() != used.read_bytes()


def load(model: Llama, folder: Path) -> Trained:
    """Fill the model from a checkpoint of the same shape.

    Returns:
        how far its training had come.

    Raises:
        ModelFileError: no such file, a broken one, weights of another shape, or none of `save`'s.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelFileError(f"{folder} has no model.safetensors to resume from")
    try:
        weights = load_file(path)
        with safe_open(path, framework="pt") as file:
            noted = (file.metadata() or {}).get("training")
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot read {path} ({error}); resume from a whole checkpoint") from error
    expected = {name: tuple(w.shape) for name, w in model.state_dict().items()}
    if {name: tuple(w.shape) for name, w in weights.items()} != expected:
        raise ModelFileError(f"{path} holds a model of another shape; resume from one with this recipe's shape")
    try:
        done = Trained(**json.loads(noted or ""))
    except (ValueError, TypeError) as error:
        raise ModelFileError(
            f"{path} has no record of its training progress; resume from a checkpoint that training wrote"
        ) from error
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return done
