"""How a decoder rotates keys: its frequencies and the layout of channels, for blocks of keys."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longreach.adapters.transformers.rotary import attention_modules
from longreach.errors import Unsupported
from longreach.ops import rotate
from longreach.ops.rope import LAYOUTS, Layout, RotaryFrequencies

_FOUND: WeakKeyDictionary[nn.Module, RotaryFrequencies] = WeakKeyDictionary()


@torch.no_grad()
def layout_of(decoder: nn.Module) -> tuple[Layout, int]:
    """The layout of channels, and the number of channels of a head that turn.

    Found by rotating random channels with the family's own function. Raises Unsupported for other rotations.
    """
    module: Any = attention_modules(decoder)[0]
    apply = getattr(sys.modules[_own(type(module)).__module__], "apply_rotary_pos_emb", None)
    embed: Any = getattr(decoder, "rotary_emb", None)
    if apply is None or embed is None:
        raise Unsupported(f"{type(decoder).__name__} has no rotary embedding that longreach supports")
    device = next(decoder.parameters()).device
    x = torch.randn(1, 2, 3, module.head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = embed(x.to(device), torch.tensor([[1, 5, 9]], device=device))
    cos, sin = cos.float().cpu(), sin.float().cpu()
    half = cos.shape[-1] // 2
    turned, _ = apply(x, x, cos, sin)
    for layout in LAYOUTS:
        if torch.allclose(rotate(x, cos[:, None, :, :half], sin[:, None, :, :half], layout=layout), turned, atol=1e-4):
            return layout, cos.shape[-1]
    raise Unsupported(f"{type(module).__name__} rotates channels in a layout longreach does not know")


def _own(kind: type) -> type:
    """A family's attention class, which may lie behind mixins."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


@torch.no_grad()
def frequencies_in(decoder: nn.Module) -> RotaryFrequencies:
    """The frequencies of a decoder whose rotation does not depend on lengths, on its device. Found once."""
    device = next(decoder.parameters()).device
    found = _FOUND.get(decoder)
    if found is None or found.inv_freq.device != device:
        layout, rotary = layout_of(decoder)
        embed: Any = decoder.rotary_emb
        like = torch.zeros(1, 2, 1, device=device)
        cos, sin = (x[0].double() for x in embed(like, torch.arange(2, device=device)[None]))
        turn = torch.atan2(sin, cos)[:, : rotary // 2]
        found = _FOUND[decoder] = RotaryFrequencies((turn[1] - turn[0]).float(), layout)
    return found
