"""Bounds of blocks on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.block_bounds import triton_kernels as kernels
from longreach.ops.types import PLAIN_GROUP, PLAIN_WIDEST, KVView, Rows

INTERPRETED: bool = kernels.INTERPRETED.value
MAX_SLOTS = 1 << 30  # slots are int32 in the kernels


@dataclass(frozen=True)
class Tuning:
    """chunk: bytes of `low` that a program of score_blocks reads at a time, and as many of `high`; warps: its warps;
    per_sm: its programs a multiprocessor, at most; slots: keys that a block's bounds are taken of at a time.
    """

    chunk: int = 16384
    warps: int = 4
    per_sm: int = 8
    slots: int = 16
    chained: bool = not INTERPRETED

    def programs(self, device: torch.device) -> int:
        """Programs that one launch of score_blocks should have, at most."""
        return 6 if INTERPRETED else self.per_sm * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def bound_blocks(
    kv: KVView, low: Tensor, high: Tensor, seq: Tensor, block: Tensor, per: int, *, in_slots: bool,
    tune: Tuning | None = None,
) -> None:  # fmt: skip
    """in_slots: `block` holds slots, each of which stands for the block that min(slot, filled - 1) lies in."""
    refuse(kv)
    count, heads = seq.shape[0], kv.heads
    if not count:
        return
    t = tune or Tuning()
    with torch.cuda.device_of(kv.k):
        kernels.bound[(count, heads)](
            seq.contiguous(), block.contiguous(), _memory(kv, low, high), IN_SLOTS=in_slots, **_shape(kv, per, t),
            num_warps=2 if kv.k.shape[3] <= PLAIN_WIDEST else 8, **_launch(t),
        )  # fmt: skip


def score_blocks(
    rows: Rows, kv: KVView, low: Tensor, high: Tensor, per: int, *, slot: Tensor, newest: bool,
    tune: Tuning | None = None,
) -> Tensor:  # fmt: skip
    """newest: the rows' newest blocks are bounded by further programs of the same launch."""
    refuse(kv, rows)
    count, heads, group = rows.q.shape[0], kv.heads, kv.group(rows)
    blocks = triton.cdiv(kv.capacity, per)
    scores = rows.q.new_empty((count, heads, blocks), dtype=torch.float32)
    if not scores.numel():
        return scores
    t = tune or Tuning()
    shape = _shape(kv, per, t)
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    if group > PLAIN_GROUP or (kv.k.shape[3] > PLAIN_WIDEST and group > 2):
        q, group = _ends(q, heads), 2
    chunk = max(16, triton.next_power_of_2(t.chunk // (shape["D2"] * kv.k.element_size())))
    shares = min(triton.cdiv(blocks, chunk), max(1, triton.cdiv(t.programs(q.device), count * heads)))
    with torch.cuda.device_of(q):
        kernels.score[(count * heads, shares + newest)](
            (q, *q.stride()[:2]), rows.seq.contiguous(), slot.contiguous(), _memory(kv, low, high), scores, blocks,
            G=heads, GROUP=group, GROUP2=triton.next_power_of_2(group), BB=chunk, NEWEST=newest, **shape,
            num_warps=t.warps if shape["D2"] <= 2 * PLAIN_WIDEST else 8, **_launch(t),
        )  # fmt: skip
    return scores


def _ends(q: Tensor, kv_heads: int) -> Tensor:
    """Two vectors for each KV head that have the scores of all its query heads, fp32 [R, 2 G, D].

    Bounds meet the sum of a channel's positive parts and the sum of its negative parts alone. A program would hold all
    query heads otherwise.
    """
    x = q.unflatten(1, (kv_heads, -1)).float()
    return torch.stack([x.clamp(min=0).sum(2), x.clamp(max=0).sum(2)], 2).flatten(1, 2)


def refuse(kv: KVView, rows: Rows | None = None) -> None:
    """Raise Unsupported for what these kernels cannot do and the reference can."""
    if kv.k.dtype == torch.float64:
        raise Unsupported("block_bounds' Triton kernels compute in fp32; for fp64 use impl='reference'")
    if torch.is_grad_enabled() and (kv.k.requires_grad or (rows is not None and rows.q.requires_grad)):
        raise Unsupported(
            "block_bounds' Triton kernels have no backward pass and q or k requires a gradient; use impl='reference', "
            "or torch.no_grad()"
        )
    if kv.k.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"block_bounds' Triton kernels run on CUDA devices, got {kv.k.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and kv.k.dtype == torch.bfloat16:
        raise Unsupported("block_bounds under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16 or fp32")
    if kv.capacity >= MAX_SLOTS:
        raise Unsupported(f"block_bounds' Triton kernels address {MAX_SLOTS - 1} slots a sequence, got {kv.capacity}")


def _memory(kv: KVView, low: Tensor, high: Tensor) -> tuple[Any, ...]:
    table = kv.seq_lens if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    filled = kv.seq_lens.contiguous()
    return (kv.k, *kv.k.stride()[:3], low, *low.stride()[:3], high, *high.stride()[:3], filled, table, table.stride(0))


def _shape(kv: KVView, per: int, t: Tuning) -> dict[str, Any]:
    paged = kv.block_table is not None and kv.block_table.shape[1] > 1
    return {
        "D": kv.k.shape[3], "D2": triton.next_power_of_2(kv.k.shape[3]), "PER": min(per, kv.capacity), "PAGED": paged,
        "PAGE": kv.page if paged else 1, "TABLED": kv.block_table is not None,
        "BN": min(t.slots, triton.next_power_of_2(per)), "CHAINED": t.chained,
    }  # fmt: skip


def _launch(t: Tuning) -> dict[str, bool]:
    return {"launch_pdl": True} if t.chained else {}
