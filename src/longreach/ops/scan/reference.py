"""scan in plain PyTorch, differentiable: one stretch of rows at a time, in chunks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from longreach.ops.carry import ScanCarry
from longreach.ops.types import accumulator

CHUNK = 64  # rows whose weights form one matrix


def scan(x: Tensor, decay: Tensor | None, seq: Tensor, pos: Tensor, carry: ScanCarry) -> tuple[Tensor, ScanCarry]:
    wide = accumulator(x.dtype)
    rate = torch.ones(x.shape[1], dtype=wide, device=x.device) if decay is None else decay.to(wide)
    means, weights = list(carry.mean.unbind(0)), list(carry.weight.unbind(0))
    outs = [x.new_zeros(0, *x.shape[1:])]
    for start, stop in _stretches(seq, pos):
        b = int(seq[start])
        if b < 0:
            outs.append(x.new_zeros(stop - start, *x.shape[1:]))
            continue
        if int(pos[start]) == 0:
            means[b], weights[b] = torch.zeros_like(means[b]), torch.zeros_like(weights[b])
        for part in x[start:stop].to(wide).split(CHUNK):
            y, means[b], weights[b] = _chunk(part, rate, means[b], weights[b])
            outs.append(y.to(x.dtype))
    if not means:
        return torch.cat(outs), carry
    return torch.cat(outs), ScanCarry(torch.stack(means), torch.stack(weights))


def _stretches(seq: Tensor, pos: Tensor) -> list[tuple[int, int]]:
    """Rows [start, stop) of one sequence each, with no position 0 but the first."""
    rows = seq.shape[0]
    fresh = pos == 0
    fresh[1:] |= seq[1:] != seq[:-1]
    starts = [0, *(fresh.nonzero()[:, 0].tolist()), rows]
    return [(a, b) for a, b in pairwise(starts) if b > a]


def _chunk(x: Tensor, rate: Tensor, mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [c, G, D] of consecutive rows x [c, G, D] after (mean [G, D], weight [G]), and the state after them."""
    i = torch.arange(x.shape[0], device=x.device)
    age = i[:, None] - i
    power = torch.where(age >= 0, rate[:, None, None] ** age.clamp(min=0), 0.0)  # [G, c, c]
    before = rate ** (i[:, None] + 1) * weight  # [c, G], the weight of what the carry holds
    total = power.sum(-1).T + before
    y = (torch.einsum("gij,jgd->igd", power, x) + before[..., None] * mean) / total[..., None]
    return y, y[-1], total[-1]
