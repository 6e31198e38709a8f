"""mix in plain PyTorch, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.mix.api import largest_gap
from longreach.ops.types import Partial


def mix(partials: tuple[Partial, ...], weights: Tensor) -> Partial:
    lses = torch.stack([p.lse for p in partials], -1)
    w = weights.to(lses.dtype)
    top = torch.where(w > 0, lses, -torch.inf).detach().amax(-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    share = w * torch.exp((lses - top[..., None]).clamp(max=largest_gap(lses.dtype)))
    total = share.sum(-1)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    share = (share / total[..., None]).masked_fill(none[..., None], 0.0)
    out = torch.zeros_like(partials[0].out)
    for s, p in enumerate(partials):
        out = out + share[..., s, None] * p.out
    return Partial(out, (top + torch.log(total)).masked_fill(none, -torch.inf))
