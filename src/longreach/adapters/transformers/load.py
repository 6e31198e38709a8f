"""Load a model and its tokenizer from a directory, or the one shipped with longreach."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from longreach.errors import InvalidInput, ModelFileError

MINI = "longreach-mini"


def model_path(model: str | Path) -> Path:
    """The directory of a model; "mini" is the one shipped. Raises ModelFileError where it is none."""
    path = Path(str(files("longreach") / "models" / MINI)) if str(model) == "mini" else Path(model)
    if not path.is_dir():
        raise ModelFileError(f"no model directory at {path}; give a folder with config.json, or 'mini'")
    if not (path / "config.json").is_file():
        raise ModelFileError(f"{path} is no model directory: it has no config.json")
    return path


def _check_weights(path: Path) -> None:
    """Open every safetensors file: its header states its length, so a truncated one is found before loading."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelFileError(f"{index} is no valid safetensors index ({error}); fetch the model again") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        file = path / name
        if not file.is_file():
            raise ModelFileError(f"{path} has no {name}; longreach loads safetensors weights only")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file} is truncated or no safetensors file ({error}); fetch it again") from error


def device_of(device: str) -> torch.device:
    """The torch device by name; "auto" takes the GPU where there is one. Raises InvalidInput where it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidInput(f"device: {device!r} is no device; use 'cpu', 'cuda' or 'auto'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "device: CUDA was asked for, but torch sees no GPU; use --device cpu, or install a CUDA torch"
        )
    return chosen


def load(model: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer) from a directory in transformers' format, or "mini" for the shipped longreach-mini.

    dtype: None means fp32 on the CPU (bf16 is slower there), the checkpoint's own elsewhere.
    Raises ModelFileError (no directory, missing, truncated or foreign files), InvalidInput (device).
    """
    path = model_path(model)
    place = device_of(device)
    _check_weights(path)
    wanted = dtype if dtype is not None else (torch.float32 if place.type == "cpu" else "auto")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # loading is quick and its bar would stand among our output
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelFileError(f"{path} could not be loaded: {str(error).splitlines()[0]}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    loaded.to(place)  # type: ignore[arg-type]
    return loaded.eval(), tokenizer
