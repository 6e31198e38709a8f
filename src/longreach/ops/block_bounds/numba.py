"""Bounds of blocks on a CPU, compiled by Numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.block_bounds import numba_kernels as kernels
from longreach.ops.numba_inputs import NO_TABLE, floats, integers, refuse
from longreach.ops.numba_math import flat, in_threads
from longreach.ops.types import KVView, Rows


def bound_blocks(
    kv: KVView, low: Tensor, high: Tensor, seq: Tensor, block: Tensor, per: int, *, in_slots: bool
) -> None:
    """in_slots: `block` holds slots; each stands for the block of slot min(slot, filled - 1)."""
    refuse("bound_blocks", kv.k, low, high)
    of, filled = integers(seq), integers(kv.seq_lens)
    named = _newest(of, filled, block, per) if in_slots else integers(block)
    _bound(_memory(kv), _bounds(low, high), filled, of, named, per)


def score_blocks(rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, *, slot: Tensor, newest: bool) -> Tensor:
    """newest: the rows' newest blocks are bounded first."""
    refuse("score_blocks", rows, kv.k, low, high)
    count, heads, dim = rows.q.shape
    of, filled = integers(rows.seq), integers(kv.seq_lens)
    memory, bounds, last = _memory(kv), _bounds(low, high), _newest(of, filled, slot, per)
    if newest:
        _bound(memory, bounds, filled, of, last, per)
    scores = torch.empty(count, kv.heads, -(-kv.capacity // per))
    q = floats(rows.q).reshape(count, kv.heads, heads // kv.heads, dim)
    workers = torch.get_num_threads()
    in_threads(workers, kernels.score, q, memory, bounds, of, np.maximum(last, 0), per, scores.numpy())
    return scores


def _bound(memory: tuple, bounds: tuple, filled: np.ndarray, of: np.ndarray, block: np.ndarray, per: int) -> None:  # type: ignore[type-arg]
    in_threads(torch.get_num_threads(), kernels.bound, memory, bounds, filled, of, block, per)


def _newest(of: np.ndarray, filled: np.ndarray, slot: Tensor, per: int) -> np.ndarray:
    """int64 [n]: the block of min(slot, filled - 1), below 0 for none."""
    found: np.ndarray = np.minimum(integers(slot), filled[of] - 1) // per
    return found


def _memory(kv: KVView) -> tuple:  # type: ignore[type-arg]
    table = NO_TABLE if kv.block_table is None else integers(kv.block_table)
    return flat(kv.k), kv.k.stride()[:3], table, kv.block_table is not None, kv.page, kv.heads, kv.k.shape[3]


def _bounds(low: Tensor, high: Tensor) -> tuple:  # type: ignore[type-arg]
    return flat(low), flat(high), low.stride()[:3], high.stride()[:3]
