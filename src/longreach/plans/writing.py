"""Plans on disk: one JSON file, and one safetensors file in the same folder for large arrays. No pickle.

The safetensors file has the JSON's stem and the beginning of its own sha256 in its name, so that a
rewritten plan never shares it with the old one: a crash leaves the old plan or the new one, complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors
from torch import Tensor

from longreach.errors import InvalidInput

FORMAT = 1
INLINE = 4096  # numbers of an array that the JSON itself holds
_NUMBERS = re.compile(r"\[\n\s*([-\d][^\[\]{}\"]*?)\n\s*\]")  # a list of numbers; no JSON text holds a line break


def write(
    path: Path, kind: str, model: Mapping[str, Any], values: Mapping[str, Any], made: Mapping[str, Any],
    arrays: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Write a plan's fields whole or not at all, its arrays first. Raises InvalidInput if the path is not writable."""
    arrays = {name: x.detach().cpu().contiguous() for name, x in arrays.items()}
    large = {name: x for name, x in arrays.items() if x.numel() > INLINE}
    content = safetensors.save(large) if large else b""
    digest = hashlib.sha256(content).hexdigest()
    file = {"name": f"{path.stem}.{digest[:12]}.safetensors", "sha256": digest} if large else None
    document = {
        "format": FORMAT,
        "kind": kind,
        "model": model,
        "values": values,
        "arrays": {name: _described(x, name in large) for name, x in arrays.items()},
        "file": file,
        "made": made,
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if file is not None:
            _replace(path.with_name(file["name"]), content)
        before = _arrays_file_of(path)
        _replace(path, text.encode())
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}; choose another --output") from error
    if before is not None and (file is None or before.name != file["name"]):
        with contextlib.suppress(OSError):  # an old plan's arrays that cannot be removed do no harm
            before.unlink(missing_ok=True)


def _described(x: Tensor, large: bool) -> dict[str, Any]:
    numbers = None if large else x.flatten().tolist()
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "numbers": numbers}


def _arrays_file_of(path: Path) -> Path | None:
    """The arrays' file of the plan that is there now, if it is one of ours."""
    try:
        name = json.loads(path.read_bytes())["file"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    ours = isinstance(name, str) and re.fullmatch(re.escape(path.stem) + r"\.[0-9a-f]{12}\.safetensors", name)
    return path.with_name(name) if ours else None


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # sessions of other processes may keep the same plan
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)
