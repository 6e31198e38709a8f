"""Read and write records, and the facts that every record states: commit, versions, device."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

from longreach.errors import InvalidInput

COMPRESSED = ".gz"
GZIP = b"\x1f\x8b"  # first bytes of a gzip file


def commit() -> tuple[str | None, bool | None]:
    """(commit, whether the tree was dirty) of the source; LONGREACH_COMMIT=hash[+dirty] if there is no git."""
    stated = os.environ.get("LONGREACH_COMMIT")
    if stated:
        return stated.removesuffix("+dirty"), stated.endswith("+dirty")
    here = Path(__file__).resolve().parent
    try:
        run = ["git", "-C", str(here)]
        tracked = subprocess.run([*run, "ls-files", "--error-unmatch", "record.py"], capture_output=True)
        if tracked.returncode:  # an installed package, possibly inside another project's checkout
            return None, None
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head, bool(changes.strip())


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def environment(device: Any) -> dict[str, Any]:
    """Commit, versions and device of this run."""
    import torch

    head, dirty = commit()
    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else (_processor())
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "tokenizers", "numpy")}
    return {
        "commit": head,
        "dirty": dirty,
        "python": sys.version.split()[0],
        "versions": versions,
        "device": {"type": place.type, "name": name, "threads": torch.get_num_threads()},
    }


def wilson(right: float, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% confidence interval of a share (Wilson, 1927).

    right: a sum of scores in [0, 1]. Scores between 0 and 1 vary less than the formula assumes, so the interval is then
    too wide.
    """
    if total == 0:
        return 0.0, 1.0
    p, n = right / total, total
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # the bounds at the ends are exactly 0 and 1; the sums above miss them by a rounding error
    return 0.0 if right == 0 else middle - half, 1.0 if right == total else middle + half


def bootstrap(values: Sequence[float], draws: int = 2000) -> list[float] | None:
    """The 95% confidence interval of a mean, from percentiles of resampled means (Efron, 1979), with a fixed seed.

    None for fewer than two values, or if one is not finite. With few values the interval is too narrow.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    random = Random(0)
    means = sorted(sum(random.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return [means[round(0.025 * (draws - 1))], means[round(0.975 * (draws - 1))]]


def check_writable(path: Path) -> None:
    """Raise InvalidInput if no record can be written there. Call it before a long measurement."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}; choose another --output") from error


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record atomically; compressed if the name ends in .gz. Equal records give equal bytes.

    Raises InvalidInput if the path cannot be written.
    """
    content = (json.dumps(record, indent=1) + "\n").encode()
    if path.suffix == COMPRESSED:
        content = gzip.compress(content, mtime=0)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}; choose another --output") from error


def read(path: Path) -> Any:
    """The JSON of a file, compressed or not. Raises OSError if it cannot be read, ValueError if it is not JSON."""
    content = path.read_bytes()
    if content[:2] == GZIP:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"compressed, but not whole: {error}") from error
    return json.loads(content)


def files(folder: Path) -> list[Path]:
    """All files below a folder whose names are those of records: *.json and *.json.gz."""
    return sorted([*folder.rglob("*.json"), *folder.rglob(f"*.json{COMPRESSED}")])
