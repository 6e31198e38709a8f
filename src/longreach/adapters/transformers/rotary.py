"""Queries and keys before rotation, for any model, without touching its code.

The layer's (cos, sin) are noted by a hook; how its module pairs channels is found out by asking its own
apply_rotary_pos_emb, and then undone with ops.rope.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn

from longreach.errors import Unsupported
from longreach.ops import rotate, unrotate
from longreach.ops.rope import Layout

LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


@cache
def layout_of(module: ModuleType, dim: int, width: int) -> tuple[Layout, int]:
    """(layout, pairs): how `module` rotates a head of `dim` channels given cos of `width` entries.

    Raises Unsupported where the module has no rotation that longreach knows.
    """
    apply = getattr(module, "apply_rotary_pos_emb", None)
    if apply is None:
        raise Unsupported(f"{module.__name__} has no rotary embedding (apply_rotary_pos_emb); this method needs one")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 3, dim, generator=generator)
    for pairs in (width // 2, width):  # cos may hold each pair once or twice
        if not 0 < 2 * pairs <= dim:
            continue
        angle = torch.rand(1, 3, pairs, generator=generator)
        cos, sin = angle.cos(), angle.sin()
        full = [torch.cat([t, t], -1) if width == 2 * pairs else t for t in (cos, sin)]
        theirs = apply(x, x, *full)[0]
        for layout in LAYOUTS:
            if torch.allclose(theirs, rotate(x, cos[:, None], sin[:, None], layout=layout), atol=1e-5):
                return layout, pairs
    raise Unsupported(f"{module.__name__} rotates channels in a layout longreach does not know; known: {LAYOUTS}")


def before_rotation(attention: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, D] rotated by the model -> unrotated. cos, sin: as the model passes them, [1 or B, T, width]."""
    layout, pairs = layout_of(sys.modules[type(attention).__module__], x.shape[-1], cos.shape[-1])
    return unrotate(x, cos[:, None, :, :pairs], sin[:, None, :, :pairs], layout=layout)
