"""across_heads on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.across_heads import by_sorting
from longreach.ops.across_heads import triton_kernels as kernels
from longreach.ops.across_heads.api import Ballot
from longreach.ops.types import KVView, Logits, Rows

INTERPRETED: bool = kernels.INTERPRETED.value
MOST_COMPARED = 2048  # keys of a head that are ranked by comparing each with all others: the work grows with the square


@dataclass(frozen=True)
class Tuning:
    """chunk: logits of a program's round; ranked, against: keys whose ranks a program finds at a time, and those that
    it compares them with at a time; shares: programs that split a row's slots or a head's keys, at most.
    """

    chunk: int = 4096
    ranked: int = 64
    against: int = 256
    shares: int = 128
    warps: int = 4
    chained: bool = not INTERPRETED


def largest_log_prob(rows: Rows, kv: KVView, lse: Tensor, logits: Logits, *, tune: Tuning | None = None) -> Tensor:
    refuse(logits.x, lse)
    count, group, t = rows.q.shape[0], kv.group(rows), tune or Tuning()
    found = rows.q.new_empty((count, kv.capacity), dtype=torch.float32)
    if found.numel():
        how, shares = _pass(kv, group, logits, t)
        with torch.cuda.device_of(found):
            kernels.largest[(count, shares)](*_rows(rows, kv, logits), lse.contiguous(), found, **how)
    return found


def spread_logits(
    rows: Rows, kv: KVView, logits: Logits, count: Tensor, recent: Tensor, *, first: int, most: int,
    tune: Tuning | None = None,
) -> Ballot:  # fmt: skip
    refuse(logits.x)
    many, heads, t = rows.q.shape[0], rows.q.shape[1], tune or Tuning()
    x = rows.q.new_empty((many, heads, kv.capacity), dtype=torch.float32)
    ballot = Ballot(x, x.new_empty((many, heads), dtype=torch.int32), x.new_empty((many, kv.capacity)))
    if x.numel():
        how, shares = _pass(kv, kv.group(rows), logits, t)
        with torch.cuda.device_of(x):
            kernels.spread[(many * kv.heads, shares)](
                *_rows(rows, kv, logits), count.contiguous(), recent.contiguous(), *ballot, first, most, **how
            )  # fmt: skip
    return ballot


def rank_round_robin(
    ballot: Ballot, index: Tensor, used: Tensor, *, first_head: int, heads: int, tune: Tuning | None = None
) -> Tensor:
    refuse(ballot.logits)
    rows, mine, capacity = index.shape
    if not index.numel():
        return ballot.scores
    if capacity > MOST_COMPARED and not INTERPRETED and tune is None:
        return by_sorting.rank(ballot.logits, ballot.scores, index, used, first_head, heads)
    t = tune or (Tuning(ranked=16, against=32) if INTERPRETED else Tuning())
    ballot = Ballot(ballot.logits.contiguous(), ballot.depth, ballot.scores)
    assert ballot.scores.is_contiguous(), ballot.scores.stride()
    with torch.cuda.device_of(index):
        kernels.rank[(rows * mine, min(t.shares, triton.cdiv(capacity, t.ranked)))](
            ballot.logits, ballot.scores, index.contiguous(), used.contiguous(), ballot.scores.shape[1], capacity, mine,
            first_head, heads, BI=t.ranked, BJ=t.against, CHAINED=t.chained, num_warps=t.warps, **_launch(t),
        )  # fmt: skip
    return ballot.scores


def refuse(*tensors: Tensor) -> None:
    """Raise Unsupported for what these kernels cannot do and the reference can."""
    if any(x.dtype == torch.float64 for x in tensors):
        raise Unsupported("across_heads' Triton kernels compute in fp32; for fp64 use impl='reference'")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise Unsupported(
            "across_heads' Triton kernels have no backward pass and logits or lse require a gradient; "
            "use impl='reference', or torch.no_grad()"
        )
    if tensors[0].device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"across_heads' Triton kernels run on CUDA devices, got {tensors[0].device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )


def _rows(rows: Rows, kv: KVView, logits: Logits) -> tuple[Any, ...]:
    x, top = logits.x.contiguous(), logits.x if logits.top is None else logits.top.contiguous()
    at = rows.seq.contiguous(), rows.pos.contiguous(), kv.seq_lens.contiguous()
    return (x, top, *at, kv.capacity, -(-kv.capacity // logits.block))


def _pass(kv: KVView, group: int, logits: Logits, t: Tuning) -> tuple[dict[str, Any], int]:
    """Constants of a pass over logits, and how many programs share a row's slots."""
    wide = triton.next_power_of_2(group)
    slots = max(16, (16 * group if INTERPRETED else t.chunk) // wide)
    how = {
        "G": kv.heads, "GROUP": group, "WIDE": wide, "BLOCK": logits.block, "HALVES": logits.top is not None,
        "BN": triton.next_power_of_2(slots), "CHAINED": t.chained, "num_warps": t.warps, **_launch(t),
    }  # fmt: skip
    return how, min(t.shares, triton.cdiv(kv.capacity, how["BN"]))


def _launch(t: Tuning) -> dict[str, bool]:
    return {"launch_pdl": True} if t.chained else {}
