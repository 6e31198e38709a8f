"""Passes that keep logits on a CPU, compiled by Numba: each key is read once, values for attend_with_logits only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.attend import numba_two_pass_kernels
from longreach.ops.attend.numba import add_sink, count_parts
from longreach.ops.numba_inputs import integers as ints
from longreach.ops.numba_inputs import memory_of, reach_of, refuse
from longreach.ops.numba_math import in_turns
from longreach.ops.numba_pool import pool_logits
from longreach.ops.numba_softmax import merge as merge_pieces
from longreach.ops.types import KVView, Logits, Partial, Rows, ScoringKeys


def attend_with_logits(
    rows: Rows, kv: KVView, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> tuple[Partial, Logits]:
    refuse("attend_with_logits", rows, kv, sink_logit)
    whole, logits = _score(rows, kv, scale, softcap, values=True)
    return add_sink(whole, sink_logit), logits


def score_keys(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    keys: ScoringKeys | None = None,
) -> tuple[Tensor, Logits]:
    refuse("score_keys", rows, kv, sink_logit, keys)
    whole, logits = _score(rows, kv, scale, softcap, values=False)
    lse = whole.lse
    return lse if sink_logit is None else torch.logaddexp(lse, sink_logit.float().expand_as(lse)), logits


def _score(rows: Rows, kv: KVView, scale: float, softcap: float | None, *, values: bool) -> tuple[Partial, Logits]:
    """The dense result, out empty where values are not read, and the logits."""
    count, heads, dim = rows.q.shape
    group, units, reach = kv.group(rows), count * kv.heads, reach_of(rows, kv)
    wide = dim if values else 0
    q = (rows.q.detach().float() * scale).contiguous().view(units, group, dim)
    kept = torch.empty(count, kv.heads, kv.capacity, group)
    workers = torch.get_num_threads()
    parts = count_parts(workers, units, int(reach.max(initial=0)))
    top, total = np.empty((2, units, parts, group), np.float32)
    out = np.empty((units, parts, group, wide), np.float32)
    given = (memory_of(kv), (ints(rows.seq), reach), np.float32(softcap or 0.0), values, kept.numpy())
    in_turns(workers, numba_two_pass_kernels.score, q.numpy(), *given, (top, total, out))
    lse, whole = torch.empty(units, group), torch.empty(units, group, wide)
    merge_pieces(top, total, out, lse.numpy(), whole.numpy())
    return Partial(whole.view(count, heads, wide), lse.view(count, heads)), Logits(kept)


def score_and_pool(rows: Rows, kv: KVView, *, scale: float, softcap: float | None, sink_logit: Tensor | None) -> Tensor:
    refuse("score_and_pool", rows, kv, sink_logit)
    lse, logits = score_keys(rows, kv, scale=scale, softcap=softcap, sink_logit=sink_logit)
    return pool_logits(rows, kv, lse, logits)
