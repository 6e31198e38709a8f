"""A model's entry in records."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from longreach.adapters.transformers import context_limit, model_path, shape_of
from longreach.plans import KINDS, default_file
from longreach.records.weights import weights_sha256


def model_info(model: Any, name: str | None) -> dict[str, Any]:
    """Name, hash of the weights, dtype, parameters and context of a model loaded from `name` (a folder, or "mini").

    None for a model that was made in Python: its class, and no hash.

    plans: for a model with shipped plans, kind -> the beginning of the sha256 of the default plan's file.
    """
    folder, shape = None if name is None else model_path(name), shape_of(model)
    defaults = {kind: path for kind in KINDS if (path := default_file(kind, shape)) is not None}
    plans = {kind: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for kind, path in defaults.items()}
    return {
        "name": type(model).__name__ if folder is None else folder.name,
        "sha256": None if folder is None else weights_sha256(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": context_limit(model),
        **({"plans": plans} if plans else {}),
    }


def info_of(model: Any) -> dict[str, Any]:
    """The same of a model in memory, with the hash of its files where it was loaded from a folder."""
    folder = str(model.name_or_path)
    return model_info(model, folder if (Path(folder) / "config.json").is_file() else None)
