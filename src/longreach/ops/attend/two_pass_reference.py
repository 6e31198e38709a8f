"""Logits kept for later passes, in plain PyTorch: fp32 as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.attend.reference import attend
from longreach.ops.reference_chunks import logits, past_reach, reach, read, steps
from longreach.ops.selection import Spans, visible
from longreach.ops.types import KVView, Logits, Partial, Rows, ScoringKeys, accumulator


def attend_with_logits(
    rows: Rows, kv: KVView, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> tuple[Partial, Logits]:
    whole = attend(rows, kv, Spans.dense(), scale=scale, softcap=softcap, sink_logit=sink_logit)
    return whole, score_keys(rows, kv, scale=scale, softcap=softcap, sink_logit=None)[1]


def score_keys(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    keys: ScoringKeys | None = None,
) -> tuple[Tensor, Logits]:
    count, heads, _ = rows.q.shape
    dtype = accumulator(rows.q.dtype)
    kept = rows.q.new_empty((count, kv.heads, kv.capacity, kv.group(rows)), dtype=dtype)
    lse = rows.q.new_full((count, heads), -torch.inf, dtype=dtype)
    for index in steps(rows, kv):
        some = rows.take(index)
        stop = reach(some, kv)
        slots = torch.arange(stop, device=some.pos.device)
        k = read(kv.k if keys is None else keys.k, kv, some.seq[0], slots, slice(None), dtype)
        if keys is not None:
            k = k * read(keys.scale, kv, some.seq[0], slots, slice(None), dtype)[..., None]
        x = logits(some.q.to(dtype), k, scale, softcap).transpose(0, 1)  # [r, H, n]
        x = x.masked_fill(~visible(some, kv, stop, "query"), -torch.inf)
        lse[index] = x.logsumexp(-1)
        kept[index, :, :stop] = x.unflatten(1, (kv.heads, -1)).transpose(2, 3)
    kept.masked_fill_(past_reach(rows, kv)[..., None], torch.nan)  # so that its use shows
    if sink_logit is not None:
        lse = torch.logaddexp(lse, sink_logit.to(dtype).expand_as(lse))
    return lse, Logits(kept)
