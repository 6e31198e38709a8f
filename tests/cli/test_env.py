"""`longreach env`: true versions, the package's place, the shipped model's hash; and what is missing, said so."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import longreach as package
from longreach.errors import ModelFileError

WEIGHTS = Path(package.__file__).parent / "models/longreach-mini/model.safetensors"


def test_the_json_says_what_this_machine_has(longreach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}

    def version(name: str) -> str:
        return {**versions, "triton": "9.8.7", "numba": "6.5"}[name]

    monkeypatch.setattr(metadata, "version", version)
    result = longreach("env", "--json")
    assert result.code == 0 and result.err == ""
    found = json.loads(result.out)
    assert found["longreach"] == package.__version__ and found["python"] == sys.version.split()[0]
    assert found["versions"] == {**versions, "triton": "9.8.7", "numba": "6.5"}
    assert found["device"]["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert Path(found["package"]) == Path(package.__file__).parent
    content = WEIGHTS.read_bytes()
    assert found["mini"] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_what_is_not_there_is_none(longreach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("triton", "numba"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    def model_path(name: str) -> Path:
        raise ModelFileError("no such model")

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr("longreach.adapters.transformers.model_path", model_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = dict(line.split(maxsplit=1) for line in longreach("env").out.splitlines())
    assert lines["versions"].endswith("triton none, numba none")
    assert lines["gpus"] == lines["mini"] == "none"
    found = json.loads(longreach("env", "--json").out)
    assert found["versions"]["triton"] is None and found["gpus"] == [] and found["mini"] is None
