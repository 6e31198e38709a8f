"""What records say of a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from longreach.adapters.transformers import context_limit, model_path


def model_about(model: Any, path: str) -> dict[str, Any]:
    """Name, hash of the weights, dtype, parameters and context of a model loaded from `path` (a folder, or "mini")."""
    folder = model_path(path)
    return {
        "name": folder.name,
        "sha256": weights_sha256(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": context_limit(model),
    }


def weights_sha256(folder: Path) -> str:
    """Over all weight files of a model directory, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
