"""score_and_pool on the GPU: attend's pieces, put together by the kernel that pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.ops.attend import triton_score_and_pool_kernels as kernels
from longreach.ops.attend.triton import launch_into, refuse
from longreach.ops.attend.triton_tuning import INTERPRETED, Tuning
from longreach.ops.attend.triton_wide import is_wide, most_rows
from longreach.ops.head_parts import part_of
from longreach.ops.selection import Spans
from longreach.ops.types import KVView, Rows

DENSE = Spans.dense()


@dataclass(frozen=True)
class Pooling:
    """chunk: logits of a program's round; shares: programs that split a row's slots among them, at most; pieces: of a
    KV head, put together at a time.
    """

    chunk: int = 4096
    warps: int = 4
    shares: int = 64
    pieces: int = 64


def score_and_pool(
    rows: Rows, kv: KVView, *, scale: float, softcap: float | None, sink_logit: Tensor | None,
    tune: Tuning | None = None, pooling: Pooling | None = None,
) -> Tensor:  # fmt: skip
    refuse(rows, kv, DENSE, sink_logit)
    count, heads, group = rows.q.shape[0], kv.heads, kv.group(rows)
    scores = rows.q.new_empty((count, heads, kv.capacity), dtype=torch.float32)
    if not scores.numel():
        return scores
    lse = rows.q.new_empty((1, count, rows.q.shape[1]), dtype=torch.float32)
    launched: list[tuple[Any, ...]] = []

    def finish(
        grid: tuple[int, ...], row_args: Any, result: Any, items: int, programs: int, **how: Any
    ) -> None:  # fmt: skip
        launched.append((row_args, result, items, programs, how))

    cut = part_of(group, most_rows(rows.q.shape[2], rows.q.dtype, count)) < group
    apart = cut and is_wide(rows.q.shape[2], group)  # a KV head has several items: their pieces are merged first

    p = pooling or Pooling(chunk=16 * group if INTERPRETED else 4096)
    wide = triton.next_power_of_2(group)
    slots = max(16, p.chunk // wide)
    with torch.cuda.device_of(rows.q):
        kept = launch_into(
            rows, kv, DENSE, scale, softcap, None, None, tune, None, lse, write=True, finish=None if apart else finish
        )  # fmt: skip
        assert kept is not None
        if apart:
            launched.append(_of_rows(rows, kv, lse))
        row_args, result, items, programs, how = launched[0]
        chain = {name: how[name] for name in ("launch_pdl",) if name in how}
        kernels.pool_pieces[(items * how["layout"][0], min(p.shares, triton.cdiv(kv.capacity, slots)))](
            row_args, result, items, programs, kept.x, kept.x if kept.top is None else kept.top,
            lse if sink_logit is None else sink_logit.contiguous(), kv.seq_lens.contiguous(), scores, kv.capacity,
            -(-kv.capacity // kept.block), layout=how["layout"], form=how["form"], WIDE=wide, BLOCK=kept.block,
            HALVES=kept.top is not None, SUNK=sink_logit is not None, DEALT=how["DEALT"], BN=slots, C=p.pieces,
            CHAINED=how["CHAINED"], num_warps=p.warps, **chain,
        )  # fmt: skip
    return scores


def _of_rows(rows: Rows, kv: KVView, lse: Tensor) -> tuple[Any, ...]:
    """What pool_pieces takes for items that are one row under a whole KV head, whose lse [1, R, H] is known."""
    count, heads = rows.q.shape[:2]
    seq = rows.seq.contiguous()
    form = (1, kv.heads, kv.group(rows), 1, kv.slot_pos is not None)
    how = {"layout": (1, 1, False), "form": form, "DEALT": False, "CHAINED": False}
    row_args = rows.q, 0, 0, seq, rows.pos.contiguous(), count, seq
    return row_args, (lse, lse, lse, (lse, lse, lse), lse, heads, count), count * kv.heads, 1, how
