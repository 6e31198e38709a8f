"""Codes of blocks and of few rows on the GPU, in one kernel each."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longreach.ops.recall import triton_code_kernels as kernels
from longreach.ops.recall.codes import KINDS, BlockCode
from longreach.ops.recall.triton import FEW as FEW_ITEMS
from longreach.ops.recall.triton import INTERPRETED, refuse
from longreach.ops.types import KVView

CHAINED = not INTERPRETED
READ = 4096  # numbers of a block, or of half its channels where they turn in pairs, that are read at a time
FEW = 4096  # queries that are coded by a program each; matrix products are faster for more


def code_blocks(
    kv: KVView, codes: Tensor, code: BlockCode, seq: Tensor, block: Tensor, per: int, *, in_slots: bool,
    means: Tensor | None,
) -> None:  # fmt: skip
    """in_slots: `block` holds slots; each stands for the block that it is the last slot of, if it is."""
    refuse(kv.k)
    turns, inv_freq, planes = _known(code, kv.k, per)  # made by the first call, which no graph captures
    if not seq.shape[0]:
        return
    paged = kv.block_table is not None and kv.block_table.shape[1] > 1
    table = kv.seq_lens if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    memory = kv.k, *kv.k.stride()[:3], codes, *codes.stride()[:3]
    values = memory if means is None else (kv.v, *kv.v.stride()[:3], means, *means.stride()[:3])
    shape = _shape(code, kv.k.shape[3])
    wide = shape["D2"] if code.kind == "bounds" else max(shape["P2"], shape["REST2"])
    held = kv.seq_lens.contiguous(), table, table.stride(0)
    with torch.cuda.device_of(kv.k):
        kernels.code[(seq.shape[0], kv.heads, 1 if means is None else 2)](
            seq.contiguous(), block.contiguous(), memory, values, held, turns, inv_freq, planes, IN_SLOTS=in_slots,
            MEANS=means is not None, EARLY=seq.shape[0] * kv.heads < FEW_ITEMS,
            PER=per, BN=min(triton.next_power_of_2(per), max(16, READ // wide)), PAGED=paged,
            PAGE=kv.page if paged else 1, TABLED=kv.block_table is not None, **shape, num_warps=4,
        )  # fmt: skip


def code_rows(q: Tensor, pos: Tensor, code: BlockCode) -> Tensor:
    rows, heads, dim = q.shape
    if code.kind == "summary" or rows * heads > FEW:
        return code.of_rows(q, pos)
    refuse(q)
    out = q.new_empty(rows, heads, code.width(dim))
    if not out.numel():
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    _, inv_freq, planes = _known(code, q)
    with torch.cuda.device_of(q):
        kernels.code_query[(rows, heads)](
            (q, *q.stride()[:2]), pos.contiguous(), inv_freq, planes, out, **_shape(code, dim), num_warps=4
        )
    return out


def _known(code: BlockCode, like: Tensor, per: int | None = None) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Rotations to the middle of a block of `per` keys, frequencies and planes; `like` where there are none."""
    turns = (like, like) if code.kind == "bounds" or per is None else code.turns(per)
    inv_freq = like if code.frequencies is None else code.frequencies.inv_freq.contiguous()
    return turns, inv_freq, like if code.planes is None else code.planes.contiguous()


def _shape(code: BlockCode, dim: int) -> dict[str, Any]:
    pairs = 0 if code.frequencies is None or code.kind == "bounds" else code.frequencies.inv_freq.shape[0]
    wide = triton.next_power_of_2(max(1, pairs))
    return {
        "KIND": KINDS.index(code.kind), "D": dim, "D2": triton.next_power_of_2(dim), "PAIRS": pairs, "P2": wide,
        "REST2": triton.next_power_of_2(max(1, dim - 2 * pairs)),
        "INTERLEAVED": code.frequencies is not None and code.frequencies.layout == "interleaved",
        "BITS": 1 if code.planes is None else code.planes.shape[1], "BB": max(1, min(32, 2048 // wide)),
        "CHAINED": CHAINED,
    } | ({"launch_pdl": True} if CHAINED else {})  # fmt: skip
