"""Scores from kept logits on a CPU, compiled by Numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.numba_inputs import floats, integers, reach_of
from longreach.ops.numba_math import in_threads
from longreach.ops.numba_pool_kernels import pool
from longreach.ops.types import KVView, Logits, Rows


def pool_logits(
    rows: Rows, kv: KVView, lse: Tensor, kept: Logits, tile: Tensor | None = None, tiles: int | None = None
) -> Tensor:
    """fp32 [tiles, G, N]: exp(logit - lse) summed over the query heads of a KV head and the rows of a tile.

    tile: int [R], the tile of each row; None: each row its own.
    """
    count, heads, group = rows.q.shape[0], kv.heads, kv.group(rows)
    pooled = torch.zeros(count if tiles is None else tiles, heads, kv.capacity)
    x = floats(kept.x).reshape(count, heads, kv.capacity * group)
    base = floats(lse).reshape(count, heads, group)
    of = np.arange(count) if tile is None else integers(tile)
    in_threads(torch.get_num_threads(), pool, x, base, reach_of(rows, kv), of, pooled.numpy())
    return pooled
