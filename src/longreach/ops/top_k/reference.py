"""top_k in plain PyTorch: a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(x: Tensor, count: Tensor, length: Tensor, *, first: int, last: int, capacity: int) -> tuple[Tensor, Tensor]:
    lists, heads, columns = x.shape
    length = (length if length.dim() == 2 else length[:, None]).expand(lists, heads).clamp(0, columns).long()
    used = torch.minimum(count.long().clamp(min=0), length)
    column = torch.arange(columns, device=x.device).expand(x.shape)
    # classes: the last columns, from the end; the first ones; numbers; NaN; past the length
    end = length[..., None]
    recent, start = column >= end - last, column < first
    group = torch.where(x.isnan(), 3, 2)
    group = torch.where(start, 1, group)
    group = torch.where(recent, 0, group)
    group = torch.where(column >= end, 4, group)
    value = torch.where(group == 2, x.float() + 0.0, 0.0)
    value = torch.where(group == 0, column.float(), value)
    # stable sorts, the least important one first
    order = value.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, group.gather(-1, order).sort(dim=-1, stable=True).indices)
    kept = torch.zeros_like(order).scatter(-1, order, column) < used[..., None]
    chosen = torch.where(kept, column, columns).sort(dim=-1).values
    index = torch.nn.functional.pad(chosen, (0, max(0, capacity - columns)))[..., :capacity]
    return index.to(torch.int32).contiguous(), used.to(torch.int32)
