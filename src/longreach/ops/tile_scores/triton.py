"""tile_log_sums and tile_scores on the GPU. Nothing waits for the device.

Bytes: each program reads the keys of its tiles once, mostly from L2, as neighbouring tiles of a head run together.
FLOPs: 2 R H D n for n keys a row, in each of both passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import refuse_gradients
from longreach.ops.tile_lists import FIRST, LAST, RowTiles
from longreach.ops.tile_scores import triton_kernels as kernels
from longreach.ops.tile_scores.cut import Cut
from longreach.ops.types import KVView, Rows

INTERPRETED: bool = triton.knobs.runtime.interpret
PIECES = 1 << 26 if not INTERPRETED else 1 << 10  # scores of pieces of tiles that are held at a time, at most


@dataclass(frozen=True)
class Tuning:
    """rows: rows x query heads of a program, at most; block: keys of a round; keys: those that a program of `score`
    goes through. Chosen so that two programs of 8 warps fit a multiprocessor of capability 9.0, by shared memory and
    registers; other settings were not tried. On an H200 log-sums reach 495 TFLOP/s in bf16 (docs/performance.md)."""

    rows: int
    block: int
    warps: int
    stages: int
    keys: int


def tuning(dtype: torch.dtype, wide: int) -> Tuning:
    """The launch for head dim `wide`, a power of two."""
    if INTERPRETED:
        return Tuning(128, 16, 1, 1, 32)
    if wide > 256:  # not measured yet
        if dtype == torch.float32:
            return Tuning(16, 16, 4, 1, 2048)
        return Tuning(64, 64, 8, 2, 2048) if wide <= 512 else Tuning(32, 32, 8, 2, 2048)
    if dtype == torch.float32:
        return Tuning(128, 32, 8, 2, 2048) if wide <= 128 else Tuning(64, 16, 8, 2, 2048)
    return Tuning(128, 128, 8, 2, 2048) if wide <= 128 else Tuning(128, 64, 8, 2, 2048)


def tile_log_sums(
    rows: Rows,
    kv: KVView,
    tiles: RowTiles,
    *,
    scale: float,
    softcap: float | None,
    sink_logit: Tensor | None,
    every: int,
    tune: Tuning | None = None,
) -> Tensor:
    refuse("tile_log_sums", rows, kv, sink_logit)
    count, heads = rows.q.shape[:2]
    lse = rows.q.new_empty((count, heads), dtype=torch.float32)
    if not count or not tiles.rows.numel():
        return lse
    t = tune or _tuning(rows)
    if _too_large(kv, rows, tiles, t):
        cut = Cut.of(rows, kv.heads, tiles, t.rows)
        found = tile_log_sums(
            cut.rows, kv, cut.tiles, scale=scale, softcap=softcap, sink_logit=None, every=every, tune=t
        )
        lse = cut.together(found)
        return lse if sink_logit is None else torch.logaddexp(lse, sink_logit.float())
    given, memory, options = _launch(rows, kv, tiles, t)
    sink = lse if sink_logit is None else sink_logit.contiguous()
    with torch.cuda.device_of(rows.q):
        kernels.log_sums[(triton.cdiv(tiles.rows.shape[0], options["COMBINE"]), kv.heads)](
            given, memory, sink, lse, heads, float(scale), float(softcap or 1.0), CAPPED=softcap is not None,
            SUNK=sink_logit is not None, EVERY=every, FIRST=FIRST, LAST=LAST, **options,
        )  # fmt: skip
    return lse


def tile_scores(
    rows: Rows,
    kv: KVView,
    tiles: RowTiles,
    lse: Tensor,
    *,
    columns: int,
    scale: float,
    softcap: float | None,
    tune: Tuning | None = None,
) -> Tensor:
    refuse("tile_scores", rows, kv, lse)
    shape = tiles.rows.shape[0], kv.heads, columns
    out = rows.q.new_empty(shape, dtype=torch.float32)
    if not out.numel() or not rows.q.shape[0]:
        return out
    t = tune or _tuning(rows)
    if not _too_large(kv, rows, tiles, t):
        _score(rows, kv, tiles, lse, scale, softcap, t, out)
        return out
    cut = Cut.of(rows, kv.heads, tiles, t.rows)
    lse, some = cut.apart(lse), max(1, PIECES // (cut.pieces * kv.heads * columns))
    for first in range(0, shape[0], some):
        taken = cut.tiles.take(slice(first * cut.pieces, (first + some) * cut.pieces))
        found = out.new_zeros((taken.rows.shape[0], *shape[1:]))  # pieces without rows are not written
        _score(cut.rows, kv, taken, lse, scale, softcap, t, found)
        torch.sum(found.unflatten(0, (-1, cut.pieces)), 1, out=out[first : first + some])
    return out


def _score(
    rows: Rows, kv: KVView, tiles: RowTiles, lse: Tensor, scale: float, softcap: float | None, t: Tuning, out: Tensor
) -> None:
    """Write the scores of tiles that programs can hold."""
    given, memory, options = _launch(rows, kv, tiles, t)
    sets, stretches = triton.cdiv(tiles.rows.shape[0], options["COMBINE"]), triton.cdiv(out.shape[2], t.keys)
    with torch.cuda.device_of(rows.q):
        kernels.score[(sets * stretches, kv.heads)](
            given, memory, lse.contiguous(), (out, *out.stride()[:2]), rows.q.shape[1], float(scale),
            float(softcap or 1.0), CAPPED=softcap is not None, KEYS=t.keys, **options,
        )  # fmt: skip


def _tuning(rows: Rows) -> Tuning:
    return tuning(rows.q.dtype, max(16, triton.next_power_of_2(rows.q.shape[2])))


def _too_large(kv: KVView, rows: Rows, tiles: RowTiles, t: Tuning) -> bool:
    """Whether a program cannot hold a tile."""
    return tiles.rows.shape[1] * kv.group(rows) > t.rows


def _launch(
    rows: Rows, kv: KVView, tiles: RowTiles, t: Tuning
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Rows and memory as the kernels take them, and their common constants."""
    heads, dim = rows.q.shape[1:]
    wide = max(16, triton.next_power_of_2(dim))
    group, size = kv.group(rows), tiles.rows.shape[1]
    width = triton.next_power_of_2(size * group)
    combine = max(16 // width, min(t.rows // width, triton.next_power_of_2(tiles.rows.shape[0])), 1)
    q = rows.q if rows.q.stride(2) == 1 and rows.q.stride(1) * heads < 1 << 31 else rows.q.contiguous()
    table = kv.seq_lens if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    paged = kv.block_table is not None and kv.block_table.shape[1] > 1
    given = (q, q.stride(0), q.stride(1), rows.seq.contiguous(), rows.pos.contiguous(), tiles.rows.contiguous(),
             tiles.start.contiguous(), tiles.rows.shape[0])  # fmt: skip
    memory = (kv.k, kv.k.stride()[:3], kv.seq_lens.contiguous(), table, table.stride(0))
    options = {
        "GROUP": group, "T": size, "W": width, "COMBINE": combine, "PAGED": paged,
        "TABLED": kv.block_table is not None, "PAGE": kv.page if paged else 1, "M": combine * width, "BN": t.block,
        "D": dim, "BD": wide, "STAGES": t.stages, "num_warps": t.warps,
    }  # fmt: skip
    return given, memory, options


def refuse(op: str, rows: Rows, kv: KVView, more: Tensor | None) -> None:
    """Raise Unsupported for what the kernels cannot do and the reference can."""
    if rows.q.dtype == torch.float64:
        raise Unsupported(f"{op}'s Triton kernel computes in fp32; for fp64 use impl='reference'")
    refuse_gradients(op, rows.q, kv.k, *(() if more is None else (more,)))
    if rows.q.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"{op}'s Triton kernel runs on CUDA devices, got {rows.q.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug it)"
        )
    if INTERPRETED and rows.q.dtype == torch.bfloat16:
        raise Unsupported(f"{op}'s Triton kernel under TRITON_INTERPRET=1: it gets bf16 wrong; use fp16, or fp32")
