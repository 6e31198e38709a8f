"""The model card: README.md and loss.png of a model directory, from its own files, training logs and evaluations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from longreach.errors import InvalidInput
from longreach.records.report.plots.style import check_installed
from longreach.train.mini.card.inputs import read
from longreach.train.mini.card.plot import loss_png
from longreach.train.mini.card.text import card


def write(model: Path, logs: Sequence[Path], records: Sequence[Path]) -> None:
    """README.md and loss.png into a model directory.

    Args:
        model: what training wrote: weights, config.json, corpus.json.
        logs: the train.json of each run that led to these weights, in order.
        records: of `longreach eval` with this model; one a length, or several with different tasks.

    Raises:
        ModelFileError: a file of the model is missing or broken.
        InvalidInput: a log or record is missing, cut short, of another version or of another model.
        Unsupported: matplotlib is not installed.
    """
    check_installed()
    inputs = read(model, logs, records)
    _replace(model / "loss.png", loss_png(inputs.runs))
    _replace(model / "README.md", card(inputs).encode())


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}; make the directory writable") from error
