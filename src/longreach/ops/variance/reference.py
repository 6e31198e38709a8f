"""sampling_variance in plain PyTorch: one row and list at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.selection import Lists
from longreach.ops.types import KVView, Partial, Rows, accumulator
from longreach.ops.variance.api import list_numbers


def sampling_variance(
    rows: Rows, kv: KVView, lists: Lists, factor: Tensor, whole: Partial, *, scale: float, softcap: float | None
) -> Tensor:
    wide, group, room = accumulator(kv.k.dtype), kv.group(rows), lists.index.shape[2]
    width, number = list_numbers(rows, kv, lists)
    found = torch.zeros(rows.q.shape[:2], dtype=wide, device=kv.k.device)
    for r, b in enumerate(rows.seq.tolist()):
        reach = min(int(kv.seq_lens[b]), int(rows.pos[r]) + 1)
        for unit, at in enumerate(number[r].tolist()):
            where, mine = divmod(at, lists.index.shape[1]), slice(unit * width, (unit + 1) * width)
            n = int(lists.count[where])
            if n > room:
                continue
            slot = lists.index[where][:n].long()
            seen = (slot >= 0) & (slot < reach)
            slot = slot[seen]
            page, offset = kv.locate(torch.full_like(slot, b), slot)
            k, v = (x[page, unit * width // group, offset].to(wide) for x in (kv.k, kv.v))
            x = (rows.q[r, mine].to(wide) * scale) @ k.T
            x = x if softcap is None else softcap * torch.tanh(x / softcap)
            if lists.log_weight is not None:
                x = x + lists.log_weight[where][:n][seen].to(wide)
            lse = whole.lse[r, mine, None].to(wide)
            weight = torch.exp(x - lse).masked_fill(lse == -torch.inf, 0.0)
            distance = (v - whole.out[r, mine, None].to(wide)).square().sum(-1)
            found[r, mine] = (factor[where][:n][seen].to(wide) * weight.square() * distance).sum(-1)
    return found
