"""Load a model and its tokenizer from a directory, or the one shipped with longreach."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from longreach.adapters.transformers.mka import register
from longreach.adapters.transformers.mka.baselines import PREFIX as MLA_PREFIX
from longreach.adapters.transformers.mka.families import PREFIX as MKA_PREFIX
from longreach.adapters.transformers.oom import out_of_memory
from longreach.errors import InvalidInput, ModelFileError, OutOfMemory
from longreach.methods.call import ModelShape
from longreach.methods.model_config import shape_of_config

MINI = "longreach-mini"


def model_path(model: str | Path) -> Path:
    """The directory of a model; "mini" is the one shipped. Raises ModelFileError if it is not one."""
    path = Path(str(files("longreach") / "models" / MINI)) if str(model) == "mini" else Path(model)
    if not path.is_dir():
        raise ModelFileError(f"no model directory at {path}; give a folder with config.json, or 'mini'")
    if not (path / "config.json").is_file():
        raise ModelFileError(f"{path} is no model directory: it has no config.json")
    return path


def shape_at(model: str | Path) -> ModelShape:
    """The shape of a model directory, or of "mini", from its configuration alone. Raises ModelFileError."""
    path = model_path(model)
    register_variants(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return shape_of_config(config.get_text_config(decoder=True))
    except Exception as error:  # a malformed file makes transformers raise anything at all
        raise broken_config(path, error) from error


def broken_config(path: Path, error: Exception) -> ModelFileError:
    """What to raise where transformers cannot read a model's configuration."""
    return ModelFileError(
        f"{path}: its config.json could not be read; fetch the model again ({type(error).__name__}: {error})"
    )


def register_variants(path: Path) -> None:
    """Let transformers load the directory of a model with MKA's layers. A broken config.json is reported later."""
    try:
        kind = str(json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (ValueError, KeyError, TypeError):
        return
    if kind.startswith((MKA_PREFIX, MLA_PREFIX)):
        register()


def _check_weights(path: Path) -> None:
    """Open every safetensors file: its header states its length, so a truncated one is found before loading."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
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


def _check_generation(path: Path) -> None:
    """transformers passes over a broken generation_config.json, and the stop tokens with it."""
    file = path / "generation_config.json"
    try:
        if file.is_file() and not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
            raise ModelFileError(f"{file} is no JSON object; fetch it again, or remove it")
    except ValueError as error:
        raise ModelFileError(f"{file} is no valid JSON ({error}); fetch it again, or remove it") from error


def _check_complete(path: Path, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Raise where weights are missing: transformers makes random ones in their place."""
    wrong = sorted(name for name, *_ in found["mismatched_keys"])
    missing = sorted(set(found["missing_keys"]) - set(wrong))
    for names, what in ((missing, "are missing from its weights"), (wrong, "have another shape in its weights")):
        if names:
            raise ModelFileError(
                f"{path}: {len(names)} tensors that config.json requires {what}, such as {names[0]}; "
                f"config.json and weights belong to different models, or a file is missing: download the model again"
            )
    unused = sorted(found["unexpected_keys"])
    if unused:
        warnings.warn(
            f"{path}: {type(model).__name__} does not use {len(unused)} tensors of the checkpoint, such as "
            f"{unused[0]}; check that config.json is this model's",
            stacklevel=3,
        )


def device_of(device: str) -> torch.device:
    """The torch device by name; "auto" takes the GPU if there is one. Raises InvalidInput if it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidInput(f"device: {device!r} is no device; use 'cpu', 'cuda' or 'auto'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device: longreach runs on 'cpu' and 'cuda', not on {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "device: CUDA was requested, but torch finds no GPU; use --device cpu, or install a CUDA torch"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device: {device!r} does not exist; torch finds {torch.cuda.device_count()} GPUs")
    return chosen


@contextmanager
def quiet() -> Iterator[None]:
    """Hides transformers' progress bars and reports; problems in them are checked and raised by us."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load(model: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer) from a directory in transformers' format, or "mini" for the shipped longreach-mini.

    dtype: None means fp32 on the CPU (bf16 is slower there), the checkpoint's own elsewhere.
    Raises ModelFileError (no directory; missing, truncated, foreign or contradicting files), InvalidInput (device),
    OutOfMemory (the weights do not fit).
    """
    path = model_path(model)
    place = device_of(device)
    register_variants(path)
    _check_weights(path)
    _check_generation(path)
    wanted = dtype if dtype is not None else (torch.float32 if place.type == "cpu" else "auto")
    part = "config and weights"
    auto: Any = AutoModelForCausalLM  # typed as if it returned only the model
    try:
        with quiet():
            loaded, found = auto.from_pretrained(
                path, dtype=wanted, local_files_only=True, trust_remote_code=False,
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
            part = "tokenizer"
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _check_complete(path, loaded, found)
        loaded.to(place)
    except ModelFileError:
        raise
    except Exception as error:  # malformed files make transformers raise anything at all
        if out_of_memory(error):
            raise OutOfMemory(f"{path} does not fit into the memory of {place}; try --dtype bfloat16") from error
        lines = str(error).strip().splitlines() or ["no reason given"]
        raise ModelFileError(
            f"{path}: its {part} could not be loaded; fetch the model again ({type(error).__name__}: {lines[0]})"
        ) from error
    return loaded.eval(), tokenizer
