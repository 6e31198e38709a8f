"""attend_blocks on the GPU: one launch over the keys of window and recalled blocks, one that mixes what came of it.

Programs hold consecutive keys of one level of a row and KV head: the mixture then knows the weight of each piece.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import refuse_wide
from longreach.ops.mix import triton_blocks_kernels as kernels
from longreach.ops.mix.triton import INTERPRETED, refuse
from longreach.ops.types import KVView, Partial, Pieces, Rows

FEW = 32  # rows x KV heads; behind more of them a kernel that starts early finds multiprocessors taken here and there
MOST_SHARES = 64


class _Shape(NamedTuple):
    """keys: of a program's round; near, far: programs among which the keys of a window and of recalled blocks are
    dealt; options: of the launch."""

    keys: int
    near: int
    far: int
    options: dict[str, Any]


def attend_blocks(
    rows: Rows, kv: KVView, first: Tensor, recalled: tuple[Tensor, Tensor] | None, summaries: Pieces | None,
    weights: Tensor, *, block: int, window: int, scale: float, levels: tuple[int, ...],
) -> Partial:  # fmt: skip
    refuse(rows.q)
    refuse_wide("attend_blocks", rows, kv)
    if INTERPRETED and rows.q.dtype == torch.bfloat16:
        raise Unsupported("attend_blocks under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16, or fp32")
    count, heads, dim = rows.q.shape
    items = count * kv.heads
    listed = 0 if recalled is None else recalled[0].shape[2] * block
    t = _shape(items, min(window, kv.capacity), listed, dim, rows.q)
    out = rows.q.new_empty((count, heads, dim), dtype=torch.float32)
    lse = rows.q.new_empty((count, heads), dtype=torch.float32)
    if not items:
        return Partial(out, lse)
    pieces = rows.q.new_empty((t.near + t.far, count, heads, dim), dtype=torch.float32)
    sizes = rows.q.new_empty((t.near + t.far, count, heads), dtype=torch.float32)
    with torch.cuda.device_of(rows.q):
        _attend(rows, kv, first, recalled, pieces, sizes, t, block, scale)
        _mix(pieces, sizes, summaries, weights, levels, t, out, lse)
    return Partial(out, lse)


def _attend(
    rows: Rows, kv: KVView, first: Tensor, recalled: tuple[Tensor, Tensor] | None, pieces: Tensor, sizes: Tensor,
    t: _Shape, block: int, scale: float,
) -> None:  # fmt: skip
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    table = kv.seq_lens if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    memory = (kv.k, *kv.k.stride()[:3], kv.v, *kv.v.stride()[:3], kv.seq_lens.contiguous(), table, table.stride(0))
    index, used = (sizes, sizes) if recalled is None else (x.contiguous() for x in recalled)
    group, paged = kv.group(rows), kv.block_table is not None and kv.block_table.shape[1] > 1
    dim, items = q.shape[2], q.shape[0] * kv.heads
    kernels.attend[(items, t.near + t.far)](
        (q, *q.stride()[:2]), rows.seq.contiguous(), rows.pos.contiguous(), first.contiguous(), index, used, memory,
        pieces, sizes, q.shape[0], float(scale), t.near, 0 if recalled is None else index.shape[2], G=kv.heads,
        GROUP=group, M=max(16, triton.next_power_of_2(group)), D=dim, D2=max(16, triton.next_power_of_2(dim)),
        BN=t.keys, LISTED=t.far > 0, BLOCK=block, PAGED=paged, PAGE=kv.page if paged else 1,
        TABLED=kv.block_table is not None, EARLY=items < FEW, CHAINED=not INTERPRETED, **t.options,
    )  # fmt: skip


def _mix(
    pieces: Tensor, sizes: Tensor, summaries: Pieces | None, weights: Tensor, levels: tuple[int, ...], t: _Shape,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    means = 0 if summaries is None else summaries.lse.shape[0]
    beside = (pieces, sizes) if summaries is None else (summaries.out.contiguous(), summaries.lse.contiguous())
    rows, heads, dim = out.shape
    wide = max(16, triton.next_power_of_2(dim))
    channels = wide
    while channels > 32 and rows * heads * (wide // channels) < 256:  # more multiprocessors take part
        channels //= 2
    at_once = triton.next_power_of_2(max(t.near + t.far, means))
    kernels.mix[(rows * heads, wide // channels)](
        pieces, sizes, *beside, weights, weights.stride(), out, lse, heads, rows * heads, t.near, t.near + t.far,
        means, LEVELS=len(levels), SECOND=levels.index(2) if means else 0, THIRD=levels.index(3) if t.far else 0,
        S=triton.next_power_of_2(t.near + t.far), S2=triton.next_power_of_2(means) if means else 0, D=dim,
        BD=channels, EARLY=rows * heads < 4 * FEW, CHAINED=not INTERPRETED,
        num_warps=1 if INTERPRETED or at_once * channels < 2048 else 4, **_chained(),
    )  # fmt: skip


def _shape(items: int, window: int, listed: int, dim: int, q: Tensor) -> _Shape:
    """How keys are dealt out. window, listed: keys of a window and of a list of blocks, at most."""
    vector, few = triton.next_power_of_2(dim) * q.element_size(), items < FEW
    if INTERPRETED:
        return _Shape(16, *_shares(5, window, listed, 16), {"STAGES": 1, "num_warps": 1})
    keys = 16 if q.element_size() == 4 else 32 if few or vector > 256 else 64
    per_sm = 2 if vector > 256 else 3 if items < 128 else 4  # as many as find registers and shared memory
    options: dict[str, Any] = {"STAGES": 3 if items < 128 else 2, "num_warps": 4}
    if per_sm == 4:
        options["maxnreg"] = 128
    shares = per_sm * _multiprocessors(q.device) // max(1, items)
    return _Shape(keys, *_shares(shares, window, listed, keys), options | _chained())


def _shares(shares: int, window: int, listed: int, keys: int) -> tuple[int, int]:
    shares = min(shares, MOST_SHARES)
    near = min(max(1, round(shares * window / (window + listed))), triton.cdiv(window, keys))
    return near, min(max(1, shares - near), triton.cdiv(listed, keys)) if listed else 0


def _chained() -> dict[str, bool]:
    return {} if INTERPRETED else {"launch_pdl": True}


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
