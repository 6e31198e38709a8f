"""recall on the GPU. Nothing waits for the device.

Few rows, as in decoding: scores, for which programs share the codes, then the choice of the highest. The logits of one
chunk of rows lie in memory in between, at most AT_ONCE of them.
Many rows that follow each other, as in prefill and training: one kernel, without logits in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import refuse_wide
from longreach.ops.recall import triton_kernels as kernels
from longreach.ops.recall.codes import Pool
from longreach.ops.types import KVView, Rows

INTERPRETED: bool = kernels.INTERPRETED.value
AT_ONCE = 1 << 25  # logits held at a time
MOST_COUNT = 512  # blocks that one program keeps in order
FEW = 32  # rows x KV heads; behind more of them a kernel that starts early finds multiprocessors taken here and there
MOST_FUSED = 32  # blocks that one program keeps for each row of a tile


@dataclass(frozen=True)
class Tuning:
    """tile: rows x heads of a tile of rows of one sequence; blocks: of a program's round; fused: the same where one
    kernel does both steps; per_sm: programs a
    multiprocessor among which blocks are dealt out; chunk: logits of a round of `choose`; full: tiles a multiprocessor
    from which on one kernel does both steps."""

    tile: int = 32 if INTERPRETED else 64
    blocks: int = 16 if INTERPRETED else 64
    fused: int = 16 if INTERPRETED else 32
    per_sm: int = 4
    chunk: int = 64 if INTERPRETED else 8192
    warps: int = 4
    full: float = 1
    chained: bool = not INTERPRETED

    def programs(self, device: torch.device) -> int:
        """Programs that a launch of few rows should have."""
        return 6 if INTERPRETED else self.per_sm * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def recall(
    rows: Rows, blocks: KVView, start: Tensor | None, stop: Tensor, *, count: int, scale: float, pool: Pool,
    tune: Tuning | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse(rows.q)
    refuse_wide("recall", rows, blocks)
    if count > MOST_COUNT:
        raise Unsupported(
            f"recall's Triton kernels choose up to {MOST_COUNT} blocks, got {count}; use impl='reference'"
        )
    t, total, summed = tune or Tuning(), rows.q.shape[0], pool == "sum"
    index = rows.q.new_empty((total, blocks.heads, count), dtype=torch.int32)
    used = rows.q.new_empty((total, blocks.heads), dtype=torch.int32)
    if not index.numel():
        return index, used
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    per_tile = _rows_of_tile(rows, blocks, t)
    tiles = triton.cdiv(total, per_tile) * blocks.heads
    memory, seq, stop = memory_of(blocks), rows.seq.contiguous(), stop.contiguous()
    start = None if start is None else start.contiguous()
    if per_tile > 1 and count <= MOST_FUSED and tiles * t.per_sm >= t.full * t.programs(q.device):
        with torch.cuda.device_of(q):
            _launch_fused(q, seq, start, stop, blocks, memory, index, used, per_tile, count, scale, summed, t)
        return index, used
    heads = blocks.heads if summed else q.shape[1]
    piece = max(16, AT_ONCE // (heads * max(1, blocks.capacity)) // 16 * 16)
    with torch.cuda.device_of(q):
        for at in range(0, total, piece):
            some = slice(at, at + piece)
            logits = q.new_empty((min(piece, total - at), heads, blocks.capacity), dtype=torch.float32)
            _launch(q[some], seq[some], None if start is None else start[some], stop[some], blocks, memory, logits,
                    index[some], used[some], per_tile, count, scale, summed, t)  # fmt: skip
    return index, used


def _launch(
    q: Tensor, seq: Tensor, start: Tensor | None, stop: Tensor, blocks: KVView, memory: tuple, logits: Tensor,
    index: Tensor, used: Tensor, per_tile: int, count: int, scale: float, summed: bool, t: Tuning,
) -> None:  # fmt: skip
    rows, begin = q.shape[0], stop if start is None else start
    same, tiled = _same(q, start, blocks, summed, t), _tiled(q, blocks, per_tile, t.blocks)
    tiles = triton.cdiv(rows, per_tile) * blocks.heads
    shares = min(triton.cdiv(blocks.capacity, tiled["BN"]), max(1, triton.cdiv(t.programs(q.device), tiles)))
    kernels.score[(tiles, shares)](
        (q, *q.stride()[:2]), seq, begin, stop, memory, logits, rows, blocks.capacity, float(scale), **tiled, **same
    )
    choose_by(logits, q, seq, start, stop, blocks, memory, index, used, summed, t)


def choose_by(
    logits: Tensor, q: Tensor, seq: Tensor, start: Tensor | None, stop: Tensor, blocks: KVView, memory: tuple,
    index: Tensor, used: Tensor, summed: bool, t: Tuning,
) -> None:  # fmt: skip
    """Fill index and used by logits."""
    same, count, items = _same(q, start, blocks, summed, t), index.shape[2], used.numel()
    wide = 1 if summed else same["WIDE"]
    chunk = min(max(16, t.chunk // wide), triton.next_power_of_2(max(16, blocks.capacity)))
    warps = 1 if INTERPRETED else 8 if chunk * wide >= 4096 else 4
    kernels.choose[(items,)](
        logits, seq, stop if start is None else start, stop, memory[4], index, used, blocks.capacity, COUNT=count,
        WIDTH=triton.next_power_of_2(count), BN=chunk, WHOLE=blocks.capacity <= chunk, EARLY=items < FEW,
        **same | {"num_warps": warps},
    )  # fmt: skip


def _launch_fused(
    q: Tensor, seq: Tensor, start: Tensor | None, stop: Tensor, blocks: KVView, memory: tuple,
    index: Tensor, used: Tensor, per_tile: int, count: int, scale: float, summed: bool, t: Tuning,
) -> None:  # fmt: skip
    kernels.score_and_choose[(triton.cdiv(q.shape[0], per_tile) * blocks.heads,)](
        (q, *q.stride()[:2]), seq, stop if start is None else start, stop, memory, index, used, q.shape[0],
        float(scale), COUNT=count, WIDTH=triton.next_power_of_2(count), **_tiled(q, blocks, per_tile, t.fused),
        **_same(q, start, blocks, summed, t),
    )  # fmt: skip


def _same(q: Tensor, start: Tensor | None, blocks: KVView, summed: bool, t: Tuning) -> dict[str, Any]:
    """What all kernels take."""
    group = q.shape[1] // blocks.heads
    return {"G": blocks.heads, "GROUP": group, "WIDE": triton.next_power_of_2(group), "STARTS": start is not None,
            "SUM": summed, "CHAINED": t.chained, "num_warps": t.warps} | (
                {"launch_pdl": True} if t.chained else {})  # fmt: skip


def _tiled(q: Tensor, blocks: KVView, per_tile: int, at_once: int) -> dict[str, Any]:
    """What the kernels of tiles take."""
    width = q.shape[2]
    paged = blocks.block_table is not None and blocks.block_table.shape[1] > 1
    return {
        "T": per_tile, "M": max(16, per_tile * triton.next_power_of_2(q.shape[1] // blocks.heads)),
        "F": width, "F2": triton.next_power_of_2(max(16, width)),
        "BN": max(16, at_once // (2 if width * q.element_size() > 512 else 1)),
        "PAGED": paged, "PAGE": blocks.page if paged else 1, "TABLED": blocks.block_table is not None,
    }  # fmt: skip


def _rows_of_tile(rows: Rows, blocks: KVView, t: Tuning) -> int:
    """Rows that one program scores: several where rows of a sequence follow each other."""
    if rows.runs is None:
        several = rows.q.shape[0] >= 2 * blocks.sequences
    else:
        several = max((run.rows for run in rows.runs), default=0) > 1
    return max(1, t.tile // triton.next_power_of_2(blocks.group(rows))) if several else 1


def memory_of(blocks: KVView) -> tuple:
    table = blocks.seq_lens if blocks.block_table is None else blocks.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    return (blocks.k, *blocks.k.stride()[:3], blocks.seq_lens.contiguous(), table, table.stride(0))


def refuse(x: Tensor) -> None:
    """Raise Unsupported for what the kernels cannot do and the reference can."""
    if x.dtype == torch.float64:
        raise Unsupported("recall's Triton kernels compute in fp32; for fp64 use impl='reference'")
    if x.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"recall's Triton kernels run on CUDA devices, got {x.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise Unsupported("recall under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16, or fp32")
