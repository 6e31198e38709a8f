"""A plan: values and arrays that a method needs about a model, found once by calibration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName
from longreach.plans.writing import write

KINDS = ("kascade", "mac", "loki", "magicpig", "a3_deep")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16,
                                                     torch.int32, torch.int64)}  # fmt: skip


class Shape(Protocol):
    """What a plan compares of a model; `methods.base.ModelShape` is one."""

    @property
    def layers(self) -> int: ...

    @property
    def query_heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def config(self) -> str: ...


@dataclass(frozen=True)
class PlannedModel:
    """The model a plan is for. name: its folder's; config: hash of its configuration. Heads are those of all ranks."""

    name: str
    config: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, name: str, shape: Shape) -> PlannedModel:
        """The model of that name and shape."""
        return cls(name, shape.config, shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim)


@dataclass(frozen=True)
class Made:
    """How a plan was made.

    data: what the text is, in words; sha256, tokens: of the tokens the model read, sha256 "" in plans that a session
    made. settings: options of the calibration; seed: of its prompts. longreach, torch, transformers: versions; commit:
    of longreach's source, where known; device: what computed it.
    """

    data: str
    sha256: str
    tokens: int
    settings: Mapping[str, Any]
    seed: int
    longreach: str
    commit: str | None
    torch: str
    transformers: str
    device: str


@dataclass(frozen=True, eq=False)
class Plan:
    """kind: the method it is for, one of KINDS. values: JSON values by name; arrays: tensors of DTYPES by name.

    What names and values mean is the kind's affair: each method has a typed view that checks them.
    Raises UnknownName for another kind, InvalidInput for values that JSON cannot hold and arrays that are not finite.
    """

    kind: str
    model: PlannedModel
    values: Mapping[str, Any]
    made: Made
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("kind of plan", self.kind, KINDS)
        for name, values in (("values", self.values), ("made.settings", self.made.settings)):
            _check_json(values, name)
        for name, x in self.arrays.items():
            dtype = str(x.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise InvalidInput(f"array {name!r} of a plan: expected one of {', '.join(DTYPES)}, got {dtype}")
            if not bool(torch.isfinite(x).all()):
                raise InvalidInput(f"array {name!r} of a plan: expected finite numbers, got others among them")

    def check(self, model: Shape, where: str = "the plan") -> None:
        """Raise InvalidInput where the plan was made for another model than this. where: what the message calls it."""
        names = [f.name for f in dataclasses.fields(PlannedModel)[1:]]
        expected, came = ({name: getattr(of, name) for name in names} for of in (self.model, model))
        differs = [name for name in names if expected[name] != came[name]]
        if differs:
            what = ", ".join(f"{_words(n)} {_short(expected[n])} expected, {_short(came[n])} came" for n in differs)
            raise InvalidInput(
                f"{where} is for {self.model.name}, and this is another model: {what}; {how_to_make(self.kind)}"
            )

    def save(self, path: Path) -> None:
        """Write it whole or not at all; see `writing`. Raises InvalidInput where the place cannot be written."""
        made = {f.name: getattr(self.made, f.name) for f in dataclasses.fields(Made)}
        write(path, self.kind, dataclasses.asdict(self.model), self.values, made, self.arrays)


def device_name(device: torch.device) -> str:
    """A device as plans name it: a GPU's own name, else the type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def how_to_make(kind: str) -> str:
    """What to do where there is no plan for a model."""
    text = "" if kind == "a3_deep" else " --text FILE"  # its prompts are of tasks only
    return f"make one for it: longreach calibrate {kind} --model MODEL{text} --output plan.json"


def _words(name: str) -> str:
    return "hash of the configuration" if name == "config" else name.replace("_", " ")


def _short(value: object) -> str:
    return value[:12] or "none" if isinstance(value, str) else str(value)


def _check_json(value: Any, where: str) -> None:
    """Raise InvalidInput unless a value comes back from JSON as it is."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{where} of a plan: expected texts as names, got {key!r}")
            _check_json(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _check_json(inner, f"{where}[{number}]")
    elif not (value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise InvalidInput(
            f"{where} of a plan: expected JSON (text, finite numbers, lists, objects), got {type(value).__name__} "
            f"{value!r:.40}"
        )
