"""Loss if each row of each layer attends only to its heaviest keys: Figure 2 of Kascade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SHARES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3)  # of a row's keys that it attends to
NAMES = ("weight", "error")


def alone(share: Tensor, v: Tensor, keys: int) -> Tensor:
    """fp64 [2, SHARES]: weight on the keys attended to, and error of the output, means over rows and query heads.

    share [T, group, n]: a KV head's weights, row by row; v [n, D]. Each row attends to a share of `keys` keys, one at
    least: to those that weigh most, summed over the query heads.
    """
    scores, whole = share.sum(1), share @ v
    found = torch.zeros(2, len(SHARES), dtype=torch.float64)
    for place, part in enumerate(SHARES):
        size = min(max(1, int(part * keys + 1e-9)), scores.shape[1])
        chosen = scores.topk(size, -1).indices
        some = share * torch.zeros_like(scores).scatter_(1, chosen, 1.0)[:, None]
        held = some.sum(-1)
        out = (some @ v) / held.clamp(min=1e-30)[..., None]
        error = (out - whole).norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-30)
        found[0, place], found[1, place] = held.mean(), error.mean()
    return found


def over_layers(means: Tensor, layers: Sequence[int]) -> dict[str, Any]:
    """means: fp64 [2, SHARES, L]; layers: those of full attention.

    all: the mean over them; first_dense: the same where the first of them attends to everything; first: that one alone.
    """
    every = means[..., list(layers)]
    dense = every.clone()
    dense[0, :, 0], dense[1, :, 0] = 1.0, 0.0
    ways = {"all": every.mean(-1), "first_dense": dense.mean(-1), "first": every[..., 0]}
    said = {way: dict(zip(NAMES, x.tolist(), strict=True)) for way, x in ways.items()}
    return {"shares": list(SHARES), **said, "layers": dict(zip(NAMES, every.transpose(1, 2).tolist(), strict=True))}
