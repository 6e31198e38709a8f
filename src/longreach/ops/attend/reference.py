"""attend in plain PyTorch, differentiable (through lse too), to be compared with the papers.

A step gathers only the slots that some row of it chooses; what no row chooses is never touched.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from longreach.ops.partial import merge
from longreach.ops.reference_chunks import logits, reach, read, steps
from longreach.ops.selection import Bound, PackedLists, Selection, beyond, visible
from longreach.ops.tile_lists import TileLists
from longreach.ops.types import KVView, Logits, Partial, Rows, accumulator


def attend(
    rows: Rows, kv: KVView, selection: Selection, *, scale: float, softcap: float | None, sink_logit: Tensor | None
) -> Partial:
    return _sunk(_attend(rows, kv, selection, scale, softcap, None, 0), sink_logit)


def attend_from_logits(
    rows: Rows, kv: KVView, selection: Selection, kept: Logits, *, sink_logit: Tensor | None
) -> Partial:
    return _sunk(_attend(rows, kv, selection, 1.0, None, None, 0, kept), sink_logit)


def _sunk(result: Partial, sink_logit: Tensor | None) -> Partial:
    if sink_logit is None:
        return result
    sink = sink_logit.to(result.lse.dtype).expand_as(result.lse)
    return merge(result, Partial(torch.zeros_like(result.out), sink))


def attend_split(
    rows: Rows, kv: KVView, selection: Selection, split: Bound, *, scale: float, softcap: float | None
) -> tuple[Partial, Partial]:
    before, after = (_attend(rows, kv, selection, scale, softcap, split, part) for part in (0, 1))
    return before, after


def _attend(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    scale: float,
    softcap: float | None,
    split: Bound | None,
    part: int,
    kept: Logits | None = None,
) -> Partial:
    """Over all selected keys, or those of one side of `split`. kept: their logits, where keys are not to be read."""
    count, heads, dim = rows.q.shape
    dtype = accumulator(rows.q.dtype)
    if isinstance(selection, (PackedLists, TileLists)):
        selection = selection.padded()  # once, not at every step
    order = steps(rows, kv)
    if not order:
        return Partial.empty(count, heads, dim, dtype=dtype, device=rows.q.device)
    outs, lses = zip(*(_step(rows, kv, selection, scale, softcap, split, part, kept, i) for i in order), strict=True)
    place = torch.cat(order).argsort()  # each row lies in one step
    return Partial(torch.cat(outs)[place], torch.cat(lses)[place])


def _step(
    rows: Rows,
    kv: KVView,
    selection: Selection,
    scale: float,
    softcap: float | None,
    split: Bound | None,
    part: int,
    kept: Logits | None,
    index: Tensor,
) -> tuple[Tensor, Tensor]:
    """out [r, H, D], lse [r, H] of the rows at `index`, which are of one sequence."""
    rows, selection = rows.take(index), selection.take(index)
    stop = reach(rows, kv)
    chosen, weight = selection.chosen(rows, kv, stop)
    mask = chosen & visible(rows, kv, stop, selection.per)
    if split is not None:
        mask = mask & (beyond(split.take(index), rows, kv, stop, selection.per) == bool(part))
    mask = mask.expand(rows.q.shape[0], -1, -1)
    known = None if kept is None else kept.take(index).natural(stop)
    if mask.shape[1] == 1:
        return _columns(rows.q, kv, rows.seq[0], slice(None), mask, weight, scale, softcap, known)
    group = rows.q.shape[1] // kv.heads
    width = 1 if selection.per == "kv" else group
    parts = []
    for g in range(kv.heads):  # KV heads choose different slots, so each gathers its own
        mine = slice(g * width, (g + 1) * width)
        q = rows.q[:, g * group : (g + 1) * group]
        w = None if weight is None else weight.expand_as(mask)[:, mine]
        x = None if known is None else known[:, g : g + 1]
        parts.append(_columns(q, kv, rows.seq[0], slice(g, g + 1), mask[:, mine], w, scale, softcap, x))
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
    known: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q [r, h, D] of the KV heads `heads` over the columns that mask [r, 1 or h, n] names; weight like mask.

    known: [r, g, n, h / g], the logits where they are known; else keys are read.
    """
    dtype = accumulator(q.dtype)
    columns = mask.any(1).any(0).nonzero()[:, 0]
    v = read(kv.v, kv, seq, columns, heads, dtype)
    if known is None:
        x = logits(q.to(dtype), read(kv.k, kv, seq, columns, heads, dtype), scale, softcap)  # [h, r, n]
    else:
        x = known[:, :, columns].permute(1, 3, 0, 2).flatten(0, 1).to(dtype)
    if weight is not None:
        x = x + weight[:, :, columns].transpose(0, 1).to(dtype)
    x = x.masked_fill(~mask[:, :, columns].transpose(0, 1), -torch.inf)
    if not columns.numel():  # one column that weighs nothing, so that out stays a function of q
        x, v = pad(x, (0, 1), value=-torch.inf), pad(v, (0, 0, 0, 1))
    # the maximum cancels out: no gradient; without keys exp(-inf) = 0
    top = x.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
    p = torch.exp(x - top)
    total = p.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    out = (p.reshape(v.shape[0], -1, p.shape[-1]) @ v).view(*x.shape[:2], -1) / total
    lse = (top + torch.log(total)).masked_fill(none, -torch.inf).squeeze(-1)
    return out.transpose(0, 1), lse.transpose(0, 1)
