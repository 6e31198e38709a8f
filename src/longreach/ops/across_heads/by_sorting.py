"""rank_round_robin by sorting each head's list: the definition, and the faster way for long lists on a GPU too."""

from __future__ import annotations

import torch
from torch import Tensor


def rank(logits: Tensor, scores: Tensor, index: Tensor, used: Tensor, first_head: int, heads: int) -> Tensor:
    """scores [R, N], with the negative of its turn for each key that a head names. No device sync.

    logits: [R, H, N]; index: int [R, H, C], ascending slots; used: int [R, H].
    """
    entry = torch.arange(index.shape[2], device=index.device)
    there = entry < used[..., None]
    place = torch.where(there, index.long(), 0)
    x = logits.gather(2, place).masked_fill(~there, -torch.inf)
    order = x.sort(dim=-1, descending=True, stable=True).indices  # ties by slot; entries not in use come last anyway
    turn = torch.empty_like(order).scatter_(2, order, entry.expand_as(order)) * heads
    turn += first_head + torch.arange(index.shape[1], device=index.device)[:, None]
    named = torch.where(there, -turn.float(), -torch.inf)
    return scores.scatter_reduce_(1, place.flatten(1), named.flatten(1), "amax")
