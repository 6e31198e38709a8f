"""Records of measurements: one file for each group of cases, rewritten after each measured case."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from longreach.errors import InvalidInput
from longreach.records import environment, write
from longreach.records.sources import source_hash

FORMAT = 1


def conditions(device: torch.device, sources: Iterable[str] = ()) -> dict[str, Any]:
    """Conditions of a measurement: commit, versions, device and its clocks.

    sources: host code that is itself what is measured, of `records.sources.SOURCES`: its hashes are added.
    """
    found = environment(device)
    versions = found["versions"]
    try:
        versions["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        versions["triton"] = None
    versions["cuda"] = torch.version.cuda
    if device.type == "cuda":
        found["device"] |= _gpu()
    hashes = {name: source_hash(name) for name in sources}
    return {**found, **({"sources": hashes} if hashes else {})}


def _gpu() -> dict[str, str]:
    """Driver and clocks as nvidia-smi reports them, under its names; empty if it cannot be run."""
    asked = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(asked, (word.strip() for word in told.splitlines()[0].split(",")), strict=True))


def add(path: Path, group: str, case: str, result: dict[str, Any]) -> None:
    """Put a case's result into its group's record; the record's other cases stay as they are.

    A spot check of the case's earlier result no longer counts: it is removed from `confirmed`, and with the last one
    `confirmed` itself.
    """
    record: dict[str, Any] = {"kind": "bench", "format": FORMAT, "group": group, "cases": {}}
    if path.is_file():
        record = read(path)
    record["cases"][case] = result
    spots = record.get("confirmed", {}).get("cases", {})
    if spots.pop(case, None) is not None and not spots:
        del record["confirmed"]
    write(path, record)


def read(path: Path) -> dict[str, Any]:
    """A bench record. Raises InvalidInput where the file is something else."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is no record: {error}; delete it or choose another --out") from error
    ours = isinstance(record, dict) and record.get("kind") == "bench" and record.get("format") == FORMAT
    if not ours or not isinstance(record.get("cases"), dict):
        raise InvalidInput(f"{path} is no bench record of format {FORMAT}; delete it or choose another --out")
    return record
