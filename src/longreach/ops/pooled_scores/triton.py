"""pooled_scores on the GPU, from kept logits: no key is read. Bytes: the logits once, and fp32 scores written once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.pooled_scores import triton_kernels as kernels
from longreach.ops.pooled_scores import triton_tiles as by_tile
from longreach.ops.types import KVView, Logits, Rows

INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Tuning:
    """chunk: logits of a program's round; shares: programs that split a row's slots among them, at most.

    tile_slots, tile_rows: of a program's round where rows are summed by tile.
    """

    chunk: int = 4096
    warps: int = 4
    shares: int = 64
    tile_slots: int = 64
    tile_rows: int = 8
    chained: bool = not INTERPRETED


def pooled_scores(
    rows: Rows,
    kv: KVView,
    *,
    scale: float,
    softcap: float | None,
    lse: Tensor | None,
    kept: Logits | None,
    tile: Tensor | None,
    tiles: int | None,
    tune: Tuning | None = None,
) -> Tensor:
    if kept is None or lse is None:
        raise Unsupported(
            "pooled_scores' Triton kernels sum kept logits: give the logits and the lse of score_keys, or use "
            "impl='reference'"
        )
    refuse(rows, kept, lse)
    count, group = rows.q.shape[0], kv.group(rows)
    pooled = rows.q.new_empty((count if tiles is None else tiles, kv.heads, kv.capacity), dtype=torch.float32)
    if not pooled.numel():
        return pooled
    t = tune or Tuning(chunk=16 * group if INTERPRETED else 4096)
    wide = triton.next_power_of_2(group)
    top = kept.x if kept.top is None else kept.top.contiguous()
    given = (
        kept.x.contiguous(), top, lse.contiguous(), rows.seq.contiguous(), rows.pos.contiguous(),
        kv.seq_lens.contiguous(),
    )  # fmt: skip
    more = {
        "G": kv.heads, "GROUP": group, "WIDE": wide, "BLOCK": kept.block, "HALVES": kept.top is not None,
        "EVICTED": kv.slot_pos is not None, "CHAINED": t.chained, "num_warps": t.warps,
    } | ({"launch_pdl": True} if t.chained else {})  # fmt: skip
    with torch.cuda.device_of(rows.q):
        if tile is None:
            slots = max(16, t.chunk // wide)
            shares = min(t.shares, triton.cdiv(kv.capacity, slots))
            kernels.pool[(count * kv.heads, shares)](*given, pooled, kv.capacity, top.shape[2], BN=slots, **more)
            return pooled
        order, end = _by_tile(tile, pooled.shape[0])
        slots = max(1, t.tile_slots * 4 // wide)
        by_tile.pool_tiles[(pooled.shape[0] * kv.heads, triton.cdiv(kv.capacity, slots))](
            *given, order, end, pooled, kv.capacity, top.shape[2], BN=slots, BR=t.tile_rows, **more
        )
    return pooled


def _by_tile(tile: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """int64 [R], the rows tile after tile, and [tiles], where those of each end."""
    if tiles == 1:
        order = torch.arange(len(tile), device=tile.device)
        return order, torch.full((1,), len(tile), device=tile.device)
    of, order = tile.long().sort(stable=True)
    return order, torch.searchsorted(of, torch.arange(tiles, device=tile.device), right=True)


def refuse(rows: Rows, kept: Logits, lse: Tensor) -> None:
    """Raise Unsupported for what the kernel cannot do and the reference can."""
    if kept.x.dtype == torch.float64:
        raise Unsupported("pooled_scores' Triton kernel computes in fp32; for fp64 use impl='reference'")
    if torch.is_grad_enabled() and (kept.x.requires_grad or lse.requires_grad):
        raise Unsupported(
            "pooled_scores' Triton kernel has no backward pass and its logits or lse require a gradient; use "
            "impl='reference', or torch.no_grad()"
        )
    if rows.q.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"pooled_scores' Triton kernel runs on CUDA devices, got {rows.q.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug it)"
        )
