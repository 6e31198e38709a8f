"""A hook of attention modules that notes each layer's rotation, and the angles of the pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from longreach.adapters.transformers.rotary import cos_sin, find_rotation, probing
from longreach.adapters.transformers.step import current


def note_rotary(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook with keywords: put the layer's rotation and (cos, sin) into the current step."""
    embeddings = kwargs.get("position_embeddings")
    if probing() or embeddings is None:
        return
    angles, step = cos_sin(embeddings), current()
    layer = step.facts.layer(int(module.layer_idx))  # type: ignore[arg-type]
    if angles is None:
        step.facts.rotations[layer] = f"layer {layer} gets no pair (cos, sin) as position_embeddings"
        return
    if layer not in step.facts.rotations:
        step.facts.rotations[layer] = find_rotation(module, args, kwargs)
    step.rotary[layer] = angles
