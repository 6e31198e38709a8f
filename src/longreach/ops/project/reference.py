"""project in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.types import KVView, Rows, accumulator


def project(rows: Rows, kv: KVView, basis: Tensor, out: Tensor, slot: Tensor, *, queries: bool) -> Tensor | None:
    dtype = accumulator(basis.dtype)
    seq, slot = rows.seq.long(), slot.long()
    there = (slot >= 0) & (slot < kv.seq_lens[seq])
    page, offset = kv.locate(seq[there], slot[there])
    keys = torch.einsum("rgd,gde->rge", kv.k[page, :, offset].to(dtype), basis.to(dtype))
    out[page, :, offset] = keys.to(out.dtype)
    if not queries:
        return None
    q = rows.q.to(dtype).unflatten(1, (kv.heads, -1))
    return torch.einsum("rghd,gde->rghe", q, basis.to(dtype)).flatten(1, 2).to(rows.q.dtype)
