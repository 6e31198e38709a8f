"""score_and_pool in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.attend.two_pass_reference import score_keys
from longreach.ops.types import KVView, Rows


def score_and_pool(rows: Rows, kv: KVView, *, scale: float, softcap: float | None, sink_logit: Tensor | None) -> Tensor:
    lse, logits = score_keys(rows, kv, scale=scale, softcap=softcap, sink_logit=sink_logit)
    base = lse.masked_fill(lse == -torch.inf, 0.0).unflatten(1, (kv.heads, 1, -1))
    return torch.exp(logits.x - base).sum(-1)  # logits past a row's reach are NaN, those of invisible keys -inf
