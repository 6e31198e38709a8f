"""Attention weights of a few rows, as no method ever holds them: one KV head and a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.methods.call import LayerCall
from longreach.ops import Spans
from longreach.ops.types import Rows

MOST = 1 << 24  # weights in memory at a time, of all query heads


class Weights(NamedTuple):
    """Attention weights of some rows and the query heads of one KV head.

    share: fp32 [r, group, n], softmax over the keys [0, n) visible to a row: it sums to 1 without the virtual sink.
    sink: fp32 [r, group], what a virtual sink (GPT-OSS) takes of the whole; 0 where there is none.
    """

    share: Tensor
    sink: Tensor


def window_of(call: LayerCall) -> int | None:
    """The layer's sliding window; None if all earlier keys are visible."""
    (seen,) = call.meter.keys
    if not isinstance(seen, Spans) or len(seen.spans) != 1:
        raise Unsupported(f"attention weights of {type(seen).__name__}: only dense attention and windows are measured")
    return None if seen.is_dense else 1 - int(seen.spans[0].start.value)


def blocks(index: Tensor, heads: int, keys: int, most: int = MOST) -> Iterator[Tensor]:
    """Rows in blocks whose weights over `keys` keys, of all query heads, are at most `most` (but one row at least)."""
    yield from index.split(max(1, most // (heads * keys)))


def weights(call: LayerCall, index: Tensor, head: int, keys: int) -> Weights:
    """Weights of the rows `index` [r] of a call with one sequence and KV head `head`, over slots [0, keys)."""
    rows, kv = call.rows.take(index), call.kv
    group = kv.group(rows)
    mine = slice(head * group, (head + 1) * group)
    slots = torch.arange(keys, device=rows.q.device)
    page, offset = kv.locate(rows.seq[:1].expand(keys), slots)
    logits = (rows.q[:, mine].float() @ kv.k[page, head, offset].float().T) * call.scale  # [r, group, n]
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~_seen(call, rows, head, keys)[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    sink = torch.zeros_like(lse)
    if call.sink_logit is not None:
        sink = torch.sigmoid(call.sink_logit[mine].float() - lse)  # e^s / (e^s + e^lse)
    return Weights((logits - lse[..., None]).exp(), sink)


def _seen(call: LayerCall, rows: Rows, head: int, keys: int) -> Tensor:
    """bool [r, n]."""
    (selection,) = call.meter.keys
    mask = selection.mask(rows, call.kv, keys)
    return mask[:, head if mask.shape[1] > 1 else 0].expand(len(rows.pos), keys)
