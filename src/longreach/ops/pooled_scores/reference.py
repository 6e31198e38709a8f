"""pooled_scores in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.by_sequence import logits, reach, read, steps
from longreach.ops.selection import visible
from longreach.ops.types import KVView, Rows, accumulator


def pooled_scores(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    lse: Tensor | None,
    tile: Tensor | None,
    tiles: int | None,
) -> Tensor:
    dtype = accumulator(rows.q.dtype)
    tile = torch.arange(rows.q.shape[0], device=rows.q.device) if tile is None else tile.long()
    pooled = rows.q.new_zeros(rows.q.shape[0] if tiles is None else tiles, kv.heads, kv.capacity, dtype=dtype)
    for index in steps(rows, kv):
        some = rows.take(index)
        stop = reach(some, kv)
        k = read(kv.k, kv, some.seq[0], torch.arange(stop, device=some.pos.device), slice(None), dtype)
        x = logits(some.q.to(dtype), k, scale, softcap).transpose(0, 1)  # [r, H, n]
        x = x.masked_fill(~visible(some, kv, stop, "query"), -torch.inf)
        total = x.logsumexp(-1) if lse is None else lse[index].to(dtype)
        p = torch.exp(x - total.masked_fill(total == -torch.inf, 0.0)[..., None])
        grouped = p.unflatten(1, (kv.heads, -1)).sum(2)
        pooled[..., :stop].index_add_(0, tile[index], grouped)
    return pooled
