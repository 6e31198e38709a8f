"""attend_amend on the GPU: attend's pieces, put together with an entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longreach.ops.attend import triton_amend_kernels as kernels
from longreach.ops.attend.amend import Entries
from longreach.ops.attend.triton import launch_into, refuse
from longreach.ops.attend.triton_tuning import Tuning
from longreach.ops.selection import Bound, Selection
from longreach.ops.types import KVView, Partial, Rows


def attend_amend(
    rows: Rows, kv: KVView, selection: Selection, split: Bound, entries: Entries, read_entry: Tensor,
    write_entry: Tensor, *,
    scale: float, softcap: float | None, sink_logit: Tensor | None, tune: Tuning | None = None,
) -> tuple[Partial, Tensor]:  # fmt: skip
    refuse(rows, kv, selection, sink_logit)
    count, heads, dim = rows.q.shape
    sides = rows.q.new_empty((2, count, heads, dim), dtype=torch.float32)
    lses = rows.q.new_empty((2, count, heads), dtype=torch.float32)
    out = rows.q.new_empty((count, heads, dim), dtype=torch.float32)
    lse, before = rows.q.new_empty((2, count, heads), dtype=torch.float32)
    sink = lse if sink_logit is None else sink_logit.contiguous()
    given = (entries.out, entries.lse, read_entry, write_entry, out, lse, before, sink)

    def finish(
        grid: tuple[int, ...], row_args: Any, result: Any, items: int, programs: int, **how: Any
    ) -> None:  # fmt: skip
        kernels.amend_pieces[grid](row_args, result, given, items, programs, SUNK=sink_logit is not None, **how)

    with torch.cuda.device_of(rows.q):
        launch_into(rows, kv, selection, scale, softcap, None, split, tune, sides, lses, finish=finish)
    return Partial(out, lse), before
