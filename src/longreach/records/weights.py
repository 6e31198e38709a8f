"""Identify the weights of a record."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_sha256(folder: Path) -> str:
    """sha256 of all weight files of a model directory, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
