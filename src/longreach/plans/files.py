"""Plans read from disk: each field of the JSON and each array is checked. `writing` describes the files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.plans.plan import DTYPES, Made, Plan, PlannedModel
from longreach.plans.writing import FORMAT


def load(path: Path | str, kind: str) -> Plan:
    """The plan in a file, read once as long as the file stays as it is.

    Raises InvalidInput, naming the field, for a file that is missing or no plan of this kind and format, or whose
    arrays are missing or damaged.
    """
    path = Path(path)
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidInput(f"no plan at {path}: {error.strerror}; check the path") from error
    return _load(path.absolute(), kind, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=32)
def _load(path: Path, kind: str, changed: int, size: int) -> Plan:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read the plan {path}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is no plan: no valid JSON ({error}); {HELP}") from error
    try:
        return _read(document, path, kind)
    except InvalidInput as error:
        raise InvalidInput(f"{path} is not a usable plan: {error}") from error


HELP = "take an undamaged copy, or calibrate again"


def _read(document: Any, path: Path, kind: str) -> Plan:
    version = document.get("format") if isinstance(document, dict) else None
    if isinstance(document, dict) and version != FORMAT:
        raise InvalidInput(
            f"format: expected {FORMAT}, got {version!r}; calibrate again with this version of longreach"
        )
    names = {
        "format": int,
        "kind": str,
        "model": dict,
        "values": dict,
        "arrays": dict,
        "file": (dict, None),
        "made": dict,
    }
    top = _fields(document, names, "the file")
    if top["kind"] != kind:
        raise InvalidInput(f"kind: expected a plan for {kind}, got one for {top['kind']!r}; give the right file")
    model = _fields(top["model"], {"name": str, "config": str, **dict.fromkeys(SIZES, int)}, "model")
    for size in SIZES:
        if model[size] < 1:
            raise InvalidInput(f"model.{size}: expected at least 1, got {model[size]}; {HELP}")
    words = dict.fromkeys(("data", "sha256", "longreach", "torch", "transformers", "device"), str)
    made = _fields(top["made"], {**words, "tokens": int, "seed": int, "settings": dict, "commit": (str, None)}, "made")
    arrays = _arrays(top["arrays"], top["file"], path)
    return Plan(kind, PlannedModel(**model), top["values"], Made(**made), arrays)


SIZES = ("layers", "query_heads", "kv_heads", "head_dim")


def _fields(document: Any, expected: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The document, which must have just these fields, of these types (None: null may stand there)."""
    if not isinstance(document, dict):
        raise InvalidInput(f"{where}: expected an object, got {_type(document)}; {HELP}")
    for name in expected:
        if name not in document:
            raise InvalidInput(f"{where} lacks the field {name!r}; {HELP}")
    for name, value in document.items():
        if name not in expected:
            raise InvalidInput(f"{where} has the unknown field {name!r}; known: {', '.join(expected)}; {HELP}")
        kinds = expected[name] if isinstance(expected[name], tuple) else (expected[name],)
        if not any(value is None if k is None else type(value) is k for k in kinds):
            wanted = " or ".join(_type(None) if k is None else NAMES[k] for k in kinds)
            raise InvalidInput(f"{where}, field {name!r}: expected {wanted}, got {_type(value)}; {HELP}")
    return document


NAMES = {
    int: "a whole number",
    str: "a text",
    dict: "an object",
    list: "a list",
    float: "a number",
    bool: "a truth value",
}


def _type(value: object) -> str:
    return "null" if value is None else NAMES.get(type(value), type(value).__name__)


def _arrays(said: dict[str, Any], file: dict[str, Any] | None, path: Path) -> dict[str, Tensor]:
    stored = {} if file is None else _stored(_fields(file, {"name": str, "sha256": str}, "file"), path)
    found = {}
    for name, about in said.items():
        where = f"array {name!r}"
        fields_of = _fields(about, {"dtype": str, "shape": list, "numbers": (list, None)}, where)
        dtype, shape, numbers = fields_of["dtype"], fields_of["shape"], fields_of["numbers"]
        if dtype not in DTYPES:
            raise InvalidInput(f"{where}: expected dtype {', '.join(DTYPES)}, got {dtype!r}; {HELP}")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise InvalidInput(f"{where}: expected a shape of whole numbers, got {shape}; {HELP}")
        if numbers is None:
            x = stored.pop(name, None)
            if x is None:
                raise InvalidInput(f"{where} is missing from the file of arrays; {HELP}")
            if x.dtype != DTYPES[dtype] or list(x.shape) != shape:
                raise InvalidInput(f"{where}: {dtype} {shape} expected, {x.dtype} {list(x.shape)} stored; {HELP}")
            found[name] = x
            continue
        whole = not DTYPES[dtype].is_floating_point
        if len(numbers) != math.prod(shape) or not all(type(n) in ((int,) if whole else (int, float)) for n in numbers):
            raise InvalidInput(f"{where}: expected {math.prod(shape)} numbers of {dtype}, got others; {HELP}")
        try:
            found[name] = torch.tensor(numbers, dtype=DTYPES[dtype]).reshape(shape)
        except (RuntimeError, OverflowError) as error:
            raise InvalidInput(f"{where}: expected numbers that {dtype} holds, got others; {HELP}") from error
    if stored:
        raise InvalidInput(f"the file of arrays holds {', '.join(sorted(stored))}, which the plan does not; {HELP}")
    return found


def _stored(file: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The tensors of the arrays' file, whose bytes must be those that were written."""
    name = file["name"]
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise InvalidInput(f"file.name: expected a safetensors file in the plan's folder, got {name!r}; {HELP}")
    try:
        content = path.with_name(name).read_bytes()
    except OSError as error:
        raise InvalidInput(f"its arrays {name} cannot be read ({error.strerror}); keep both files together") from error
    if hashlib.sha256(content).hexdigest() != file["sha256"]:
        raise InvalidInput(f"its arrays {name} are damaged: their sha256 is another than the plan names; {HELP}")
    try:
        return safetensors.load(content)
    except SafetensorError as error:
        raise InvalidInput(f"its arrays {name} are no safetensors file ({error}); {HELP}") from error
