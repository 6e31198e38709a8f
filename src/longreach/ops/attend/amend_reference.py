"""attend_amend in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.ops.attend.amend import Entries
from longreach.ops.attend.reference import attend_split
from longreach.ops.partial import merge
from longreach.ops.selection import Bound, Selection
from longreach.ops.types import KVView, Partial, Rows


def attend_amend(
    rows: Rows, kv: KVView, selection: Selection, split: Bound, entries: Entries, read_entry: Tensor,
    write_entry: Tensor, *,
    scale: float, softcap: float | None, sink_logit: Tensor | None,
) -> tuple[Partial, Tensor]:  # fmt: skip
    before, after = attend_split(rows, kv, selection, split, scale=scale, softcap=softcap)
    none, at = read_entry < 0, read_entry.clamp(min=0).long()
    earlier = Partial(entries.out[at].masked_fill(none[..., None], 0.0), entries.lse[at].masked_fill(none, -torch.inf))
    before = merge(before, earlier)
    some = write_entry >= 0
    entries.out[write_entry[some].long()] = before.out[some]
    entries.lse[write_entry[some].long()] = before.lse[some]
    whole = merge(before, after)
    if sink_logit is not None:
        sink = sink_logit.to(whole.lse.dtype).expand_as(whole.lse)
        whole = merge(whole, Partial(torch.zeros_like(whole.out), sink))
    return whole, before.lse
