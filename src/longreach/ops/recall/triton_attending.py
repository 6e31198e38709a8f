"""Attention to summaries on the GPU, and the choice of blocks by its logits. Nothing waits for the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import refuse_wide
from longreach.ops.recall import triton_attending_kernels as kernels
from longreach.ops.recall.triton import FEW, INTERPRETED, MOST_COUNT, Tuning, choose_by, memory_of, refuse
from longreach.ops.types import KVView, Pieces, Rows

MOST_SHARES = 64


def attend_summaries(
    rows: Rows, blocks: KVView, start: Tensor | None, stop: Tensor, *, count: int | None, scale: float
) -> tuple[Pieces, Tensor | None, Tensor | None]:
    """count: of blocks to choose, None for no choice."""
    refuse(rows.q)
    refuse_wide("recall", rows, blocks)
    if count is not None and count > MOST_COUNT:
        raise Unsupported(
            f"recall's Triton kernels choose up to {MOST_COUNT} blocks, got {count}; use impl='reference'"
        )
    total, heads, dim = rows.q.shape
    items, q = total * blocks.heads, rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    vector = triton.next_power_of_2(dim) * q.element_size()
    at_once = 16 if INTERPRETED or q.element_size() == 4 else 64 if vector <= 256 else 32
    shares = _shares(items, triton.cdiv(blocks.capacity, at_once), rows)
    out = q.new_empty((shares, total, heads, dim), dtype=torch.float32)
    lse = q.new_empty((shares, total, heads), dtype=torch.float32)
    index = used = None
    if count is not None:
        index = q.new_empty((total, blocks.heads, count), dtype=torch.int32)
        used = q.new_empty((total, blocks.heads), dtype=torch.int32)
    if not items:
        return Pieces(out, lse), index, used
    logits = lse if index is None else q.new_empty((total, heads, blocks.capacity), dtype=torch.float32)
    memory, seq, stop = memory_of(blocks), rows.seq.contiguous(), stop.contiguous()
    begin = stop if start is None else start.contiguous()
    group = blocks.group(rows)
    paged = blocks.block_table is not None and blocks.block_table.shape[1] > 1
    chained = {} if INTERPRETED else {"launch_pdl": True}
    with torch.cuda.device_of(q):
        kernels.attend[(items, shares)](
            (q, *q.stride()[:2]), seq, begin, stop, memory, (blocks.v, *blocks.v.stride()[:3]), logits, out, lse,
            total, blocks.capacity, float(scale), G=blocks.heads, GROUP=group, M=max(16, triton.next_power_of_2(group)),
            D=dim, D2=max(16, triton.next_power_of_2(dim)), BN=at_once, STAGES=3, STARTS=start is not None,
            SCORES=index is not None, PAGED=paged, PAGE=blocks.page if paged else 1,
            TABLED=blocks.block_table is not None, EARLY=items < FEW, CHAINED=not INTERPRETED, num_warps=4, **chained,
        )  # fmt: skip
        if index is not None and used is not None:
            choose_by(logits, q, seq, start, stop, blocks, memory, index, used, False, Tuning())
    return Pieces(out, lse), index, used


def _shares(items: int, most: int, rows: Rows) -> int:
    """Programs among which the summaries of a row and KV head are dealt."""
    per_sm = 2 if items < FEW else 3  # as many as find shared memory
    programs = 3 * items if INTERPRETED else Tuning(per_sm=per_sm).programs(rows.q.device)
    return max(1, min(MOST_SHARES, most, programs // max(1, items)))
