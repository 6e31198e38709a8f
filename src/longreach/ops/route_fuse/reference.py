"""route_fuse in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longreach.ops.carry import CarryMemory, ScanCarry
from longreach.ops.route_fuse.api import RouterLayer
from longreach.ops.types import accumulator


def route_fuse(
    k: Tensor, v: Tensor, router: RouterLayer, decay: Tensor | None, seq: Tensor, pos: Tensor, memory: CarryMemory,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide, dim = accumulator(k.dtype), k.shape[2]
    real = seq >= 0
    row, own = real.nonzero()[:, 0], seq[real].long()
    both = torch.cat([k, v], -1)
    x = both[row].to(wide)
    carry = memory.read()
    fresh = pos[row] == 0
    mean = carry.mean[own].masked_fill(fresh[:, None, None], 0.0)
    held = _rate(decay, limit, carry.weight) * carry.weight[own].masked_fill(fresh[:, None], 0.0)
    mean = (x + held[..., None] * mean) / (1 + held)[..., None]
    after = carry.mean.index_copy(0, own, mean.detach()), carry.weight.index_copy(0, own, 1 + held.detach())
    memory.write(ScanCarry(*after))
    weights = _weights(router, row, wide)
    first, second = weights[:, None, None].unbind(-1)
    mixed = (first * x + second * mean.to(k.dtype)).to(k.dtype)
    out = torch.zeros_like(both).index_copy(0, row, mixed)
    return out[..., :dim], out[..., dim:], weights.new_zeros(len(k), 2).index_copy(0, row, weights)


def _rate(decay: Tensor | None, limit: float, like: Tensor) -> Tensor:
    if decay is None:
        return like.new_ones(())
    return torch.sigmoid(decay.clamp(-limit, limit).to(torch.promote_types(decay.dtype, torch.float32))).to(like.dtype)


def _weights(router: RouterLayer, row: Tensor, wide: torch.dtype) -> Tensor:
    """[r, 2], the weights of the levels of some rows."""
    if router.hidden is None or router.weight is None:
        routed = torch.full((len(row), 2), 0.5, dtype=wide, device=row.device)
    else:
        logits = F.linear(F.silu(router.hidden[row]), router.weight, router.bias).to(wide)
        soft, first = logits.softmax(-1), logits[:, :1] >= logits[:, 1:]
        hard = torch.cat([first, ~first], -1).to(wide)
        routed = hard + (soft - soft.detach()) if router.hard else soft
    start = torch.stack([torch.ones_like(routed[:, 0]), torch.zeros_like(routed[:, 0])], -1)
    return start + router.gate.to(wide) * (routed - start)
