"""attend for tiles of a prompt on the GPU: one launch for a tile's list and its own keys. Nothing waits for the device.

Bytes: K and V of the listed keys once for each tile (through L2, as neighbouring tiles of a head run together), the
entries of the lists, queries and results once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend import triton_prompt_tiles_kernels as kernels
from longreach.ops.attend.triton_tuning import INTERPRETED, next_power_of_2
from longreach.ops.selection import PackedLists
from longreach.ops.tile_lists import TileLists
from longreach.ops.types import KVView, Partial, Rows


@dataclass(frozen=True)
class Tuning:
    """rows: rows x query heads that a program attends for, at most; block: keys of a round; stages: rounds whose keys
    are under way at a time. Chosen by shared memory and registers of compute capability 9.0; other settings were not
    tried. On an H200 attention to lists reaches 340 TFLOP/s in bf16 with 128K tokens (docs/performance.md)."""

    rows: int
    block: int
    warps: int
    stages: int


def tuning(dtype: torch.dtype, wide: int) -> Tuning:
    """The launch for head dim `wide`, a power of two."""
    if INTERPRETED:
        return Tuning(64, 16, 1, 1)
    if dtype == torch.float32:
        return Tuning(64, 32, 4, 2) if wide <= 128 else Tuning(32, 16, 4, 2)
    return Tuning(128, 64, 8, 3) if wide <= 128 else Tuning(64, 64, 4, 2)


def attend_tiles(
    rows: Rows, kv: KVView, selection: TileLists, scale: float, softcap: float | None, sink_logit: Tensor | None,
    tune: Tuning | None = None,
) -> Partial:  # fmt: skip
    """attend for a selection that `refuse` takes."""
    lists, tiles = selection.lists, selection.tiles
    assert isinstance(lists, PackedLists) and tiles is not None
    count, heads, dim = rows.q.shape
    out = rows.q.new_empty(rows.q.shape, dtype=torch.float32)
    lse = rows.q.new_empty((count, heads), dtype=torch.float32)
    if not count or not tiles.rows.numel():
        return Partial(out, lse)
    wide = max(16, next_power_of_2(dim))
    group, size = kv.group(rows), tiles.rows.shape[1]
    t = tune or tuning(rows.q.dtype, wide)
    together = min(size, max(1, t.rows // group))
    pieces = -(-size // together)
    q = rows.q if rows.q.stride(2) == 1 and rows.q.stride(1) * heads < 1 << 31 else rows.q.contiguous()
    table = kv.seq_lens if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    paged = kv.block_table is not None and kv.block_table.shape[1] > 1
    mapped = lists.head_map is not None and lists.heads > 1
    head_map = lists.offsets if lists.head_map is None else lists.head_map.contiguous()
    given = (q, q.stride(0), q.stride(1), rows.seq.contiguous(), rows.pos.contiguous(), tiles.rows.contiguous(),
             tiles.start.contiguous(), tiles.rows.shape[0])  # fmt: skip
    memory = (kv.k, kv.k.stride()[:3], kv.v, kv.v.stride()[:3], kv.seq_lens.contiguous(), table, table.stride(0))
    sink = lse if sink_logit is None else sink_logit.contiguous()
    with torch.cuda.device_of(rows.q):
        kernels.attend_tiles[(tiles.rows.shape[0] * pieces, kv.heads)](
            given, memory, (lists.index.contiguous(), lists.offsets.contiguous(), head_map), (out, lse, sink, heads),
            float(scale), float(softcap or 1.0), GROUP=group, T=size, TS=together, PIECES=pieces, HEADS=lists.heads,
            MAPPED=mapped, PAGED=paged, TABLED=kv.block_table is not None, PAGE=kv.page if paged else 1,
            CAPPED=softcap is not None, SUNK=sink_logit is not None, M=max(16, next_power_of_2(together * group)),
            BN=t.block, D=dim, BD=wide, STAGES=t.stages, num_warps=t.warps,
        )  # fmt: skip
    return Partial(out, lse)


def refuse(rows: Rows, kv: KVView, selection: TileLists) -> None:
    """Raise Unsupported for what this kernel cannot do and the reference can."""
    if not isinstance(selection.lists, PackedLists) or selection.tiles is None:
        raise Unsupported(
            "attend's Triton kernel for tiles takes packed lists of whole tiles, got some rows of them or lists with a "
            "capacity; pass the selection of all rows, or use impl='reference'"
        )
    if kv.slot_pos is not None:
        raise Unsupported(
            "attend's Triton kernel for tiles takes slots that are positions, got slot_pos; use impl='reference'"
        )
