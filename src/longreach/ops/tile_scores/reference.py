"""tile_log_sums and tile_scores in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longreach.ops.reference_chunks import logits, reach, read, steps
from longreach.ops.selection import visible
from longreach.ops.tile_lists import FIRST, LAST, RowTiles
from longreach.ops.types import KVView, Rows, accumulator


def tile_log_sums(
    rows: Rows, kv: KVView, tiles: RowTiles, *, scale: float, softcap: float | None, sink_logit: Tensor | None,
    every: int,
) -> Tensor:  # fmt: skip
    dtype = accumulator(rows.q.dtype)
    found = rows.q.new_full(rows.q.shape[:2], torch.nan, dtype=dtype)
    tile, place = (tiles.rows >= 0).nonzero(as_tuple=True)
    number = tiles.rows[tile, place].long()
    listed = rows.take(number)
    for index in steps(listed, kv):
        some = listed.take(index)
        stop = reach(some, kv)
        k = read(kv.k, kv, some.seq[0], torch.arange(stop, device=some.pos.device), slice(None), dtype)
        x = logits(some.q.to(dtype), k, scale, softcap).transpose(0, 1)  # [r, H, n]
        x = x.masked_fill(~visible(some, kv, stop, "query"), -torch.inf)
        if every > 1:
            slot, end = torch.arange(stop, device=x.device), (tiles.start[tile[index]] - LAST)[:, None]
            between = (slot >= FIRST) & (slot < end)
            taken = (slot - FIRST) % every == 0
            x = (x + (between * math.log(every))[:, None].to(dtype)).masked_fill(
                (between & ~taken)[:, None], -torch.inf
            )
        if sink_logit is not None:
            x = torch.cat([x, sink_logit.to(dtype)[None, :, None].expand(x.shape[0], -1, 1)], -1)
        found[number[index]] = x.logsumexp(-1)
    return found


def tile_scores(
    rows: Rows, kv: KVView, tiles: RowTiles, lse: Tensor, *, columns: int, scale: float, softcap: float | None
) -> Tensor:
    dtype = accumulator(rows.q.dtype)
    pooled = rows.q.new_zeros(tiles.rows.shape[0], kv.heads, columns, dtype=dtype)
    tile, place = (tiles.rows >= 0).nonzero(as_tuple=True)
    number = tiles.rows[tile, place].long()
    listed = rows.take(number)
    for index in steps(listed, kv):
        some, of = listed.take(index), tile[index]
        stop = int(tiles.start[of].max())
        k = read(kv.k, kv, some.seq[0], torch.arange(stop, device=some.pos.device), slice(None), dtype)
        x = logits(some.q.to(dtype), k, scale, softcap).transpose(0, 1)  # [r, H, n]
        total = lse[number[index]].to(dtype)[..., None]
        p = torch.exp(x - total.masked_fill(total == -torch.inf, torch.inf))
        pooled[..., :stop].index_add_(0, of, p.unflatten(1, (kv.heads, -1)).sum(2))
    start = torch.where((tiles.rows >= 0).any(1), tiles.start, 0)
    past = torch.arange(columns, device=pooled.device) >= start[:, None]
    return pooled.masked_fill_(past[:, None], torch.nan)
