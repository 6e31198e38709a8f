"""Kascade's view of a plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from longreach.errors import InvalidInput
from longreach.methods.base import is_count
from longreach.ops.types import require
from longreach.plans import Plan, how_to_make

KIND = "kascade"
HELP = "take another plan, or calibrate again (longreach calibrate kascade)"


@dataclass(frozen=True)
class KascadePlan:
    """The anchor layers, and the head map of the other layers.

    anchors: layers that choose keys, ascending; the first is the first of `layers`, and attends densely.
    head_map [L][G]: the KV head of `anchor_of(layer)` whose keys a layer's KV head attends to. Many to one, over the
    heads of all ranks. In anchors and in layers outside the plan each head has its own number.
    layers: layers of full attention, ascending. The others attend to their window and are outside the plan.
    k: keys of a tile in the comparison of layers. tile: query rows of a tile, the group's heads counted;
    None in a plan for decode only.
    dense_below: device -> phase -> tokens below which dense attention was measured to be faster there (`longreach plan
    break-even`); empty if that was not measured.
    Raises InvalidInput if these do not fit each other.
    """

    anchors: tuple[int, ...]
    head_map: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    k: int
    tile: int | None
    dense_below: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_layers("layers", self.layers, len(self.head_map))
        _check_layers("anchors", self.anchors, len(self.head_map))
        strange = [n for n in self.anchors if n not in self.layers]
        require(not strange, f"anchors: expected layers of full attention, got {strange} as well; {HELP}")
        require(
            self.anchors[0] == self.layers[0],
            f"anchors: expected the first to be {self.layers[0]}, the first layer of full attention, got "
            f"{self.anchors[0]}; {HELP}",
        )
        heads = len(self.head_map[0]) if isinstance(self.head_map[0], tuple) else 0
        reusing = {n for n in self.layers if n not in self.anchors}
        for layer, row in enumerate(self.head_map):
            whole = isinstance(row, tuple) and len(row) == heads > 0 and all(is_count(h) and h < heads for h in row)
            require(
                whole,
                f"head_map of layer {layer}: expected {heads or 'some'} KV heads below {heads}, one for each head, got "
                f"{row!r}; {HELP}",
            )
            require(
                layer in reusing or row == tuple(range(heads)),
                f"head_map of layer {layer}, which takes no other layer's keys: expected each head its own, got "
                f"{row!r}; {HELP}",
            )
        for name, value in (("k", self.k), *((("tile", self.tile),) if self.tile is not None else ())):
            require(is_count(value, 1), f"{name}: expected a count from 1 to {2**31 - 1}, got {value!r}; {HELP}")
        _check_dense_below(self.dense_below)

    @classmethod
    def of(cls, plan: Plan) -> KascadePlan:
        """The view of a plan of kind "kascade". Raises InvalidInput, naming the field that is missing or wrong."""
        require(plan.kind == KIND, f"expected a plan for {KIND}, got one for {plan.kind}; give the right file")
        values = plan.values
        found = cls(
            anchors=_numbers(values, "anchors"),
            head_map=tuple(_row(row, n) for n, row in enumerate(_list(values, "head_map"))),
            layers=_numbers(values, "layers"),
            k=_value(values, "k"),
            tile=values.get("tile"),
            dense_below=values.get("dense_below", {}),
        )
        size = (len(found.head_map), len(found.head_map[0]))
        wanted = (plan.model.layers, plan.model.kv_heads)
        require(
            size == wanted,
            f"head_map: expected {wanted[0]} layers of {wanted[1]} KV heads, got {size[0]} of {size[1]}; {HELP}",
        )
        return found

    def values(self) -> dict[str, Any]:
        """As a plan's values hold it; `of` reads it back."""
        return {
            "anchors": list(self.anchors),
            "head_map": [list(row) for row in self.head_map],
            "layers": list(self.layers),
            "k": self.k,
            **({} if self.tile is None else {"tile": self.tile}),
            **({} if not self.dense_below else {"dense_below": self.dense_below}),
        }

    def anchor_of(self, layer: int) -> int:
        """The anchor that chooses a layer's keys: the last at or before it. layer: one of `layers`."""
        return self.anchors[bisect_right(self.anchors, layer) - 1]


def _check_dense_below(found: object) -> None:
    devices = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    require(devices, f"dense_below: expected the values of each device by its name, got {found!r}; {HELP}")
    assert isinstance(found, Mapping)
    for name, phases in found.items():
        known = isinstance(phases, Mapping) and set(phases) <= {"decode", "prefill"}
        require(
            known and all(is_count(tokens) for tokens in phases.values()),
            f"dense_below of {name}: expected numbers of tokens for decode and prefill, got {phases!r}; measure them "
            f"again (longreach plan break-even)",
        )


def tokens_of_tile(tile: int | None, group: int) -> int:
    """Tokens of a prompt's tile. group: query heads of a KV head. Raises InvalidInput for a plan without tiles."""
    if tile is None:
        raise InvalidInput(
            f"kascade: the plan lacks the value 'tile', so it serves decode only and cannot read prompts; give it to "
            f"decode= alone, or {how_to_make(KIND)}"
        )
    return max(1, tile // group)


def _check_layers(name: str, layers: tuple[int, ...], count: int) -> None:
    some = isinstance(layers, tuple) and len(layers) > 0
    require(some, f"{name}: expected at least one layer number, got {layers!r}; {HELP}")
    known = all(is_count(n) and n < count for n in layers)
    require(known, f"{name}: expected layer numbers from 0 to {count - 1}, got {layers}; {HELP}")
    require(all(a < b for a, b in pairwise(layers)), f"{name}: expected ascending and distinct, got {layers}; {HELP}")


def _value(values: Mapping[str, Any], name: str) -> Any:
    require(name in values, f"the plan lacks the value {name!r}; {HELP}")
    return values[name]


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    found = _value(values, name)
    require(
        isinstance(found, list) and len(found) > 0,
        f"{name}: expected a list, not an empty one, got {found!r}; {HELP}",
    )
    return found


def _numbers(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(_list(values, name))


def _row(row: object, layer: int) -> tuple[int, ...]:
    require(isinstance(row, list), f"head_map of layer {layer}: expected a list of KV heads, got {row!r}; {HELP}")
    assert isinstance(row, list)
    return tuple(row)
