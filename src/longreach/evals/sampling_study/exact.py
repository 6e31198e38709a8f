"""Exact attention of a few rows, and estimates of it from weighted keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.evals.layers import relative_errors
from longreach.methods.call import LayerCall


@dataclass(frozen=True)
class Exact:
    """Attention of the rows of a call with one sequence, in fp32.

    logits: [R, H, n], -inf at keys that are invisible to a row. share: [R, H, n], attention weights; they sum to 1 less
    the virtual sink's. sink: [R, H], the virtual sink's weight (GPT-OSS), else 0. out: [R, H, D].
    k, v: [n, G, D]. context: int64 [R], keys visible to each row.
    """

    logits: Tensor
    share: Tensor
    sink: Tensor
    out: Tensor
    k: Tensor
    v: Tensor
    context: Tensor

    @classmethod
    def of(cls, call: LayerCall) -> Exact:
        """Attention of all rows of a call over all visible keys."""
        rows, kv = call.rows, call.kv
        count, group = int(kv.seq_lens[0]), kv.group(rows)
        slots = torch.arange(count, device=rows.q.device)
        page, offset = kv.locate(torch.zeros_like(slots), slots)
        k, v = kv.k[page, :, offset].float(), kv.v[page, :, offset].float()
        q = rows.q.float().unflatten(1, (kv.heads, group))
        logits = torch.einsum("rgxd,ngd->rgxn", q, k).flatten(1, 2) * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        logits = logits.masked_fill(slots > rows.pos.long()[:, None, None], -torch.inf)
        lse = logits.logsumexp(-1)
        sink = torch.zeros_like(lse)
        if call.sink_logit is not None:
            sink = torch.sigmoid(call.sink_logit.float() - lse)
        share = (logits - lse[..., None]).exp() * (1 - sink[..., None])
        out = _values(share, v)
        return cls(logits, share, sink, out, k, v, rows.pos.long() + 1)

    def estimate(self, weight: Tensor) -> Tensor:
        """[R, H, D]: softmax over a sample, each key counted `weight` times, fp32 [R, H, n]."""
        share = self.share * weight
        total = share.sum(-1) + self.sink
        return _values(share, self.v) / total.clamp(min=1e-30)[..., None]

    def error(self, out: Tensor) -> Tensor:
        """fp64 [R, H]: |out - o| / |o|."""
        return relative_errors(out, self.out)

    def pooled(self) -> Tensor:
        """[R, G, n]: weights summed over the query heads of each KV head."""
        return self.share.unflatten(1, (self.k.shape[1], -1)).sum(2)


def _values(share: Tensor, v: Tensor) -> Tensor:
    """Weighted sums of values: [R, H, n] and [n, G, D] -> [R, H, D]."""
    return torch.einsum("rgxn,ngd->rgxd", share.unflatten(1, (v.shape[1], -1)), v).flatten(1, 2)
