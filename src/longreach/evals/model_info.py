"""A model's entry in records."""

from __future__ import annotations

from typing import Any

from longreach.adapters.transformers import context_limit, model_path
from longreach.records.weights import weights_sha256


def model_info(model: Any, path: str) -> dict[str, Any]:
    """Name, hash of the weights, dtype, parameters and context of a model loaded from `path` (a folder, or "mini")."""
    folder = model_path(path)
    return {
        "name": folder.name,
        "sha256": weights_sha256(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": context_limit(model),
    }
