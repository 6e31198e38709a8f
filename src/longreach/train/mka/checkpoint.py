"""A model folder that training writes: the model as transformers reads it, a record, a journal, the state to resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longreach.errors import InvalidInput, LongreachError, ModelFileError

CONVERSION = "conversion.json"  # how a model was converted, and its distance from the original then
RECORD = "training.json"
JOURNAL = "training.jsonl"
STATE = "training-state.safetensors"
PART = ".part"


def replace(path: Path, content: bytes) -> None:
    """Write a file at once: whoever is killed while writing leaves the old one."""
    part = path.with_name(path.name + PART)
    part.write_bytes(content)
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """A file of JSON, written at once."""
    replace(path, (json.dumps(value, indent=1) + "\n").encode())


def check_free(folder: Path) -> None:
    """Raise InvalidInput unless a new model may be written to `folder`: it is missing or empty."""
    if (folder / STATE).is_file():
        raise InvalidInput(f"{folder} holds an unfinished training; continue it with --resume, or remove it")
    if not is_free(folder):
        raise InvalidInput(f"{folder} exists and is not an empty folder; choose another --out, or remove it")


def is_free(folder: Path) -> bool:
    """Whether a folder is missing or empty, but for the journal of a training that has saved nothing.

    Raises InvalidInput if it cannot be read.
    """
    try:
        return not folder.exists() or (folder.is_dir() and {x.name for x in folder.iterdir()} <= {JOURNAL})
    except OSError as error:
        raise InvalidInput(f"cannot read {folder}: {error.strerror}; choose another --out") from error


def free_folder(folder: Path) -> None:
    """Make an empty folder, or leave one as it is. Raises InvalidInput as `check_free`, or if it cannot be made."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write to {folder}: {error.strerror}; choose another --out") from error


def save_state(folder: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Write what training continues from, at once."""
    held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    save_file(held, folder / (STATE + PART), metadata={"training": json.dumps(progress)})
    os.replace(folder / (STATE + PART), folder / STATE)


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_state` wrote. Raises InvalidInput, or ModelFileError for a broken file."""
    path = folder / STATE
    if not path.is_file():
        done = " (its training is complete)" if (folder / RECORD).is_file() else ""
        raise InvalidInput(f"{folder} has no {STATE} to resume from{done}; leave out --resume, or choose another --out")
    try:
        with safe_open(path, framework="pt") as file:
            progress = json.loads((file.metadata() or {})["training"])
            return {name: file.get_tensor(name) for name in file.keys()}, progress  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelFileError(f"cannot read {path} ({error}); start again in another folder") from error


class Steps:
    """The journal of training: a line of JSON for each step.

    first: the step that is written next; lines of later ones, from after the last checkpoint, are dropped.
    """

    def __init__(self, path: Path | None, first: int):
        self._path = path
        if path is not None:
            lines = path.read_bytes().splitlines(keepends=True) if first and path.is_file() else []
            replace(path, b"".join(lines[:first]))

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a step's line."""
        if self._path is not None:
            try:
                with self._path.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
            except OSError as error:
                raise LongreachError(f"cannot write {self._path} ({error}); free some space, then --resume") from error
