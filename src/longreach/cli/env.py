"""`longreach env`: this machine's description for bug reports and records."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from longreach.cli.common import add_json
from longreach.cli.show import emit

NAME = "env"
HELP = "show versions, devices and the shipped model"
EXAMPLES = ("longreach env", "longreach env --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def gather() -> dict[str, Any]:
    """Versions, devices, the package's place and the shipped model's size and hash."""
    import hashlib
    from importlib import metadata

    import torch

    import longreach
    from longreach.adapters.transformers import model_path
    from longreach.errors import ModelFileError
    from longreach.records import environment

    found = {"longreach": longreach.__version__, **environment("cpu")}
    for package in ("triton", "numba"):
        try:
            found["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found["versions"][package] = None
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["package"] = str(Path(longreach.__file__).parent)
    try:
        weights = model_path("mini") / "model.safetensors"
        content = weights.read_bytes()
        found["mini"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    except (ModelFileError, OSError):
        found["mini"] = None
    return found


def run(args: argparse.Namespace) -> int:
    found = gather()
    if args.json:
        emit(found)
        return 0
    for key, value in found.items():
        print(f"{key:10} {_shown(value)}")
    return 0


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items())
    return "none" if value in (None, []) else str(value)
