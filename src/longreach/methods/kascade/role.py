"""The role of a layer in a plan, on the device and for the KV heads of this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.methods.kascade.plan import KascadePlan
from longreach.ops import HeadShard
from longreach.ops.types import require
from longreach.plans import device_name

FIRST = "first anchor"


class BreakEven(NamedTuple):
    """Tokens below which dense attention is faster on a device; 0 if that was not measured."""

    device: str = ""
    decode: int = 0
    prefill: int = 0


NOT_MEASURED = BreakEven()


@dataclass(frozen=True)
class LayerRole:
    """A layer's role, the same for all sequences.

    anchor: the layer whose lists it attends to; an anchor's own number. dense: why it attends densely, else None.
    serves: whether other layers attend to its lists. head_map: int64 [G] on the device, the head of the anchor whose
    keys each KV head takes, None where each takes its own or one set serves all. tile: rows of a tile, the query heads
    of a group counted; None in a plan for decode only. break_even: of this device.
    """

    anchor: int
    dense: str | None
    serves: bool
    head_map: Tensor | None
    tile: int | None
    break_even: BreakEven = NOT_MEASURED


def role_of(
    plan: KascadePlan,
    layer: int,
    *,
    mapped: bool,
    dense_layers: tuple[int, ...],
    shard: HeadShard,
    device: torch.device,
) -> LayerRole:
    """The role of a layer. mapped: whether heads take keys through the plan's map.

    Raises InvalidInput for a layer outside the plan, Unsupported if a rank would need another rank's choice.
    """
    require(
        layer in plan.layers,
        f"kascade: layer {layer} attends to its whole context, and takes no part in the plan (it attended to a window "
        f"when that was made); make a plan for the model as it is (longreach calibrate kascade)",
    )
    anchor = plan.anchor_of(layer)
    dense = FIRST if layer == plan.anchors[0] else "in dense_layers" if layer in dense_layers else None
    reusing = (n for n in plan.layers if n not in plan.anchors and n not in dense_layers)
    serves = any(plan.anchor_of(n) == layer for n in reusing)
    name = device_name(device)
    break_even = BreakEven(name, **plan.dense_below.get(name, {}))
    if not mapped:
        return LayerRole(anchor, dense, serves, None, plan.tile, break_even)
    check_shard(plan, shard)
    here = [head - shard.first for head in plan.head_map[layer][shard.first : shard.first + shard.count]]
    own = here == list(range(shard.count))
    return LayerRole(anchor, dense, serves, None if own else torch.tensor(here, device=device), plan.tile, break_even)


def check_shard(plan: KascadePlan, shard: HeadShard) -> None:
    """Raise Unsupported, on every rank, where the head map of any layer crosses ranks that hold equal parts."""
    for layer in plan.layers:
        for head, other in enumerate(plan.head_map[layer]):
            if head // shard.count != other // shard.count:
                raise Unsupported(
                    f"kascade: with {shard.count} of {shard.total} KV heads a rank, head {head} of layer {layer} would "
                    f"need the keys that head {other} of layer {plan.anchor_of(layer)} chooses on another rank; use "
                    f"heads='all', which makes one choice for all ranks, or a plan for this number of ranks "
                    f"(longreach calibrate kascade --ranks {shard.total // shard.count})"
                )
