"""Write a model and its tokenizer to a directory that `load` reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers.load import quiet

PART = ".part"
EXACT = ".planes"  # random projections of hashes: rounded, they would choose other blocks


def save(model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a model directory. Each file is replaced at once, the weights last; other files in it stay.

    dtype: of the weights in the files; None: as they are. The model itself stays as it is. Raises OSError.
    """
    part = folder / PART
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    state = model.state_dict() if dtype is None else _cast(model.state_dict(), dtype)
    before = model.config.dtype  # which save_pretrained changes
    try:
        with quiet():
            model.save_pretrained(part, state_dict=state)
            tokenizer.save_pretrained(part)
    finally:
        model.config.dtype = before
    if dtype is not None:  # transformers writes that of the model
        config = json.loads((part / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in sorted(part.iterdir(), key=lambda f: f.suffix == ".safetensors"):
        os.replace(file, folder / file.name)
    part.rmdir()


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in another dtype. Tied ones stay one tensor."""
    cast, found = dict[tuple[int, torch.Size], Tensor](), dict[str, Tensor]()
    for name, x in state.items():
        keep = not x.is_floating_point() or name.endswith(EXACT)
        found[name] = x if keep else cast.setdefault((x.data_ptr(), x.shape), x.detach().to(dtype))
    return found
