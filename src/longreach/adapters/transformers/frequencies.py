"""The frequencies by which a model rotates, for any model with a rotary module.

The decoder's rotary module computes (cos, sin) for all layers. It is run for positions 0 and 1. The difference of their
angles is the frequency, with any scaling included. Each layer's first pass is checked against these frequencies.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from longreach.errors import Unsupported
from longreach.ops import RotaryAngles, RotaryFrequencies, angles
from longreach.ops.rope import Layout

KNOWN_TYPES = ("default", "linear", "llama3", "yarn", "proportional")  # frequencies that do not depend on lengths
NAME = "rotary_emb"  # the rotary module of transformers' decoders


def check_frequencies(name: str, decoder: nn.Module, config: Any) -> None:
    """Raise Unsupported where a model's frequencies depend on lengths, or no module computes them."""
    parameters = config.rope_parameters
    each = parameters.values() if all(isinstance(x, dict) for x in parameters.values()) else (parameters,)
    for kind in (one.get("rope_type", "default") for one in each):
        if kind not in KNOWN_TYPES:
            raise Unsupported(
                f"{name} has a rotary embedding of type {kind!r}, and a method needs frequencies that do not depend on "
                f"the length (types {', '.join(KNOWN_TYPES)}); use another method, or options without them"
            )
    if not isinstance(getattr(decoder, NAME, None), nn.Module):
        raise Unsupported(f"{name} has no module {NAME!r}, and a method needs the frequencies of its rotation")


@torch.no_grad()
def frequencies_of(
    decoder: nn.Module, layer_types: Collection[str] | None, layer: int, layout: Layout, angled: RotaryAngles,
    pos: Tensor,
) -> RotaryFrequencies:  # fmt: skip
    """The frequencies of a layer. angled: how rows at positions `pos` [R] were rotated there, as a check.

    A device sync. Raises Unsupported where the rotary module gives other angles than the layer gets.
    """
    name, module = type(decoder).__name__, getattr(decoder, NAME)
    more = {}
    if "layer_type" in inspect.signature(module.forward).parameters and layer_types is not None:
        more = {"layer_type": list(layer_types)[layer]}
    pairs, like = angled.cos.shape[-1], pos.new_zeros(1, 2, 1, dtype=torch.float32)
    try:
        cos, sin = (x[0].double() for x in module(like, torch.arange(2, device=pos.device)[None], **more))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise Unsupported(f"{name}: its rotary module could not be run for two positions: {error}") from error
    turn = torch.atan2(sin, cos)
    turn = turn[1] - turn[0]
    found: Tensor | None = None
    if turn.shape[-1] == pairs:
        found = turn
    elif turn.shape[-1] == 2 * pairs:  # each pair twice, one half behind the other or side by side
        found = next((a for a, b in (turn.chunk(2), (turn[::2], turn[1::2])) if torch.equal(a, b)), None)
    if found is None or not _same(found, angled, pos):
        raise Unsupported(
            f"{name}: layer {layer} is rotated by other angles than its rotary module gives for positions 0 and 1 "
            f"(frequencies that depend on the length?); a method needs frequencies that do not"
        )
    return RotaryFrequencies(found.float(), layout)


def _same(found: Tensor, angled: RotaryAngles, pos: Tensor) -> bool:
    """Whether the rows were rotated by these frequencies, to the digits that cos and sin have."""
    cos, sin = angled.cos.double(), angled.sin.double()
    size = (cos**2 + sin**2).sqrt()
    want = angles(pos, found)
    digits = 2e-2 if angled.cos.element_size() < 4 else 1e-3
    slack = digits + pos.double()[:, None] * found * 2.0**-21  # the model multiplies positions in fp32
    return all(bool(((x / size - y).abs() <= slack).all()) for x, y in zip((cos, sin), want, strict=True))
