"""attend in plain PyTorch, differentiable (through lse too), to be read beside the papers.

A step gathers only the slots that some row of it chooses; what no row chooses is never touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.by_sequence import logits, reach, read, steps
from longreach.ops.partial import merge
from longreach.ops.selection import Selection, visible
from longreach.ops.types import KVView, Partial, Rows, accumulator


def attend(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    count, heads, dim = rows.q.shape
    result = Partial.empty(count, heads, dim, dtype=accumulator(rows.q.dtype), device=rows.q.device)
    out, lse = result.out, result.lse
    for index in steps(rows, kv):
        o, z = _step(rows.take(index), kv, selection.take(index), scale, softcap)
        out, lse = out.index_copy(0, index, o), lse.index_copy(0, index, z)
    if sink_logit is None:
        return Partial(out, lse)
    return merge(Partial(out, lse), Partial(torch.zeros_like(out), sink_logit.to(lse.dtype).expand(count, heads)))


def _step(rows: Rows, kv: KVView, selection: Selection, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """out [r, H, D], lse [r, H] of rows of one sequence."""
    stop = reach(rows, kv)
    chosen, weight = selection.chosen(rows, kv, stop)
    mask = (chosen & visible(rows, kv, stop, selection.per)).expand(rows.q.shape[0], -1, -1)
    if mask.shape[1] == 1:
        return _columns(rows.q, kv, rows.seq[0], slice(None), mask, weight, scale, softcap)
    group = rows.q.shape[1] // kv.heads
    width = 1 if selection.per == "kv" else group
    parts = []
    for g in range(kv.heads):  # KV heads choose different slots, so each gathers its own
        mine = slice(g * width, (g + 1) * width)
        q = rows.q[:, g * group : (g + 1) * group]
        w = None if weight is None else weight[:, mine]
        parts.append(_columns(q, kv, rows.seq[0], slice(g, g + 1), mask[:, mine], w, scale, softcap))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _columns(
    q: Tensor,
    kv: KVView,
    seq: Tensor,
    heads: slice,
    mask: Tensor,
    weight: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """q [r, h, D] of the KV heads `heads` over the columns that mask [r, 1 or h, n] names; weight like mask."""
    dtype = accumulator(q.dtype)
    columns = mask.any(1).any(0).nonzero()[:, 0]
    k = read(kv.k, kv, seq, columns, heads, dtype)
    v = read(kv.v, kv, seq, columns, heads, dtype)
    x = logits(q.to(dtype), k, scale, softcap)  # [h, r, n]
    if weight is not None:
        x = x + weight[:, :, columns].transpose(0, 1).to(dtype)
    x = x.masked_fill(~mask[:, :, columns].transpose(0, 1), -torch.inf)
    if not columns.numel():
        x = x.new_full((*x.shape[:2], 1), -torch.inf)
        v = v.new_zeros(v.shape[0], 1, v.shape[2])
    # the maximum is a constant of the formula: no gradient; a row over no keys has none, and exp(-inf) = 0
    top = x.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
    p = torch.exp(x - top)
    total = p.sum(-1, keepdim=True)
    out = (p.view(k.shape[0], -1, p.shape[-1]) @ v).view(*x.shape[:2], -1) / total.clamp(min=1e-30)
    lse = (top + torch.log(total)).squeeze(-1)
    return out.transpose(0, 1), lse.transpose(0, 1)
