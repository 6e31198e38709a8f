"""pooled_scores in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.reference_chunks import logits, past_reach, reach, read, steps
from longreach.ops.selection import visible
from longreach.ops.types import KVView, Logits, Rows, accumulator


def pooled_scores(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    lse: Tensor | None,
    kept: Logits | None,
    tile: Tensor | None,
    tiles: int | None,
) -> Tensor:
    dtype = accumulator(rows.q.dtype)
    pooled = rows.q.new_zeros(rows.q.shape[0] if tiles is None else tiles, kv.heads, kv.capacity, dtype=dtype)
    of = torch.arange(rows.q.shape[0], device=rows.q.device) if tile is None else tile.long()
    for index in steps(rows, kv):
        some = rows.take(index)
        stop = reach(some, kv)
        if kept is None:
            k = read(kv.k, kv, some.seq[0], torch.arange(stop, device=some.pos.device), slice(None), dtype)
            x = logits(some.q.to(dtype), k, scale, softcap).transpose(0, 1)  # [r, H, n]
        else:
            x = kept.take(index).natural(stop).to(dtype).transpose(2, 3).flatten(1, 2)
        x = x.masked_fill(~visible(some, kv, stop, "query"), -torch.inf)
        total = x.logsumexp(-1) if lse is None else lse[index].to(dtype)
        p = torch.exp(x - total.masked_fill(total == -torch.inf, 0.0)[..., None])
        grouped = p.unflatten(1, (kv.heads, -1)).sum(2)
        pooled[..., :stop].index_add_(0, of[index], grouped)
    return pooled if tile is not None else pooled.masked_fill_(past_reach(rows, kv), torch.nan)
