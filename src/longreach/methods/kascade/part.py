"""What part a layer has in a plan, on the device and for the KV heads that are here: the state of the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import NothingToForget
from longreach.errors import Unsupported
from longreach.methods.kascade.copies import KeyCopy
from longreach.methods.kascade.plan import KascadePlan
from longreach.ops import HeadShard
from longreach.ops.types import require

FIRST = "first anchor"


@dataclass(frozen=True)
class Part(NothingToForget):
    """What `part_of` finds of a layer, and the copy of its keys that it is scored with, or None.

    anchor: the layer whose choice it attends to, its own number in an anchor; dense: why it attends densely, or None;
    serves: whether other layers attend to its choice; head_of: int [G] on the device, the head of the anchor that each
    KV head takes the keys of, None where each takes its own or one set serves all; tile: rows of a tile, the query
    heads of a group counted. All this is the same for all sequences.
    """

    anchor: int
    dense: str | None
    serves: bool
    head_of: Tensor | None
    tile: int
    copy: KeyCopy | None = None

    @property
    def moved(self) -> int:
        """How often memory was replaced, which what was captured in a graph has to know."""
        return 0 if self.copy is None else self.copy.moved


def part_of(
    plan: KascadePlan,
    layer: int,
    *,
    mapped: bool,
    dense_layers: tuple[int, ...],
    shard: HeadShard,
    device: torch.device,
) -> Part:
    """The part of a layer. mapped: whether heads take keys through the plan's map.

    Raises InvalidInput for a layer that takes no part, Unsupported where a rank would need the choice of another.
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
    if not mapped:
        return Part(anchor, dense, serves, None, plan.tile)
    check_shard(plan, shard)
    here = [head - shard.first for head in plan.head_map[layer][shard.first : shard.first + shard.count]]
    own = here == list(range(shard.count))
    return Part(anchor, dense, serves, None if own else torch.tensor(here, device=device), plan.tile)


def check_shard(plan: KascadePlan, shard: HeadShard) -> None:
    """Raise Unsupported, on every rank, where the head map of any layer crosses ranks that hold equal parts."""
    for layer in plan.layers:
        for head, other in enumerate(plan.head_map[layer]):
            if head // shard.count != other // shard.count:
                raise Unsupported(
                    f"kascade: with {shard.count} of {shard.total} KV heads a rank, head {head} of layer {layer} would "
                    f"need the keys that head {other} of layer {plan.anchor_of(layer)} chooses on another rank; use "
                    f"heads='all', which makes one choice for all ranks, or a plan for so many ranks "
                    f"(longreach calibrate kascade --ranks {shard.total // shard.count})"
                )
