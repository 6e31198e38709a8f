"""Keys in 8 bits, for scoring."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.types import FLOATS, describe, require


def quantise_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit keys with one scale for each token and head: (int8 [..., D], scale fp32 [...]).

    k: float [..., D]. scale = max |k| / 127. Each channel is off by at most scale / 2 (and fp32's rounding), so a logit
    by at most |softmax scale| sum |q| max |k| / 254. Keys of all zeros have scale 0. No device sync.
    """
    ok = isinstance(k, Tensor) and k.dtype in FLOATS and k.dim() >= 1
    require(ok, f"k: expected bf16, fp16, fp32 or fp64 [..., D], got {describe(k)}")
    x = k.float()
    scale = x.abs().amax(-1) / 127
    codes = torch.round(x / scale.masked_fill(scale == 0, 1.0)[..., None]).clamp(-127, 127)
    return codes.to(torch.int8), scale
