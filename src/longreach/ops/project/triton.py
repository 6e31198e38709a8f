"""project on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.head_parts import apart, part_of, together
from longreach.ops.project import triton_kernels as kernels
from longreach.ops.types import PLAIN_WIDEST, KVView, Rows

INTERPRETED: bool = kernels.INTERPRETED.value


@dataclass(frozen=True)
class Tuning:
    """vectors: keys or queries of one KV head that a program projects together, at least 16 (tensor cores); columns:
    of the basis that a program has; warps: its warps.
    """

    vectors: int = 16
    columns: int = 64
    warps: int = 4
    chained: bool = not INTERPRETED


def tuning(rows: int, itemsize: int, queries: bool, dim: int) -> Tuning:
    """Decode steps have few rows and many programs; prompts fill the tensor cores."""
    if dim > PLAIN_WIDEST:  # fewer columns fit a program
        return Tuning(columns=64 // itemsize, warps=8)
    return Tuning(vectors=16 if queries or rows <= 64 else 64, columns=64 if itemsize == 2 else 32)


def project(
    rows: Rows, kv: KVView, basis: Tensor, out: Tensor, slot: Tensor, *, queries: bool, tune: Tuning | None = None
) -> Tensor | None:
    refuse(rows, kv, basis)
    count, heads, dim = rows.q.shape
    group, width = kv.group(rows), basis.shape[2]
    projected = rows.q.new_empty((count, heads, width)) if queries else None
    if not count:
        return projected
    t = tune or tuning(count, rows.q.element_size(), queries, dim)
    if queries and dim > PLAIN_WIDEST and group > t.vectors:
        return _in_parts(rows, kv, basis, out, slot, t)
    group2 = triton.next_power_of_2(group)
    tile = max(1, t.vectors // group2) if queries else t.vectors
    columns = max(16, min(t.columns, triton.next_power_of_2(width)))
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    table = kv.seq_lens if kv.block_table is None else kv.block_table
    table = table if table.stride(-1) == 1 else table.contiguous()
    memory = kv.k, *kv.k.stride()[:3], out, *out.stride()[:3], kv.seq_lens.contiguous(), table, table.stride(0)
    paged = kv.block_table is not None and kv.block_table.shape[1] > 1
    launch: dict[str, Any] = {"launch_pdl": True} if t.chained else {}
    with torch.cuda.device_of(q):
        kernels.project_rows[(triton.cdiv(count, tile), kv.heads, triton.cdiv(width, columns))](
            (q, *q.stride()[:2]), rows.seq.contiguous(), slot.contiguous(), memory, (basis, *basis.stride()[:2]),
            q if projected is None else projected, count, GROUP=group, GROUP2=group2, TILE=tile,
            KEYS=max(16, triton.next_power_of_2(tile)), D=dim, D2=max(16, triton.next_power_of_2(dim)), WIDTH=width,
            BW=columns, QUERIES=queries, PAGED=paged, PAGE=kv.page if paged else 1, TABLED=kv.block_table is not None,
            CHAINED=t.chained, num_warps=t.warps, **launch,
        )  # fmt: skip
    return projected


def _in_parts(rows: Rows, kv: KVView, basis: Tensor, out: Tensor, slot: Tensor, t: Tuning) -> Tensor:
    """Each row several times, each time with as many query heads of a KV head as a program holds: all of them write the
    same coordinates of the row's key."""
    group, heads = kv.group(rows), kv.heads
    parts = group // part_of(group, t.vectors)
    seq, pos, slot = (x.repeat_interleave(parts) for x in (rows.seq, rows.pos, slot))
    found = project(Rows(apart(rows.q, heads, parts), seq, pos), kv, basis, out, slot, queries=True, tune=t)
    assert found is not None
    return together(found, heads, parts)


def refuse(rows: Rows, kv: KVView, basis: Tensor) -> None:
    """Raise Unsupported for what this kernel cannot do and the reference can."""
    if kv.k.dtype == torch.float64:
        raise Unsupported("project's Triton kernel sums in fp32; for fp64 use impl='reference'")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (rows.q, kv.k, basis)):
        raise Unsupported(
            "project's Triton kernel has no backward pass and q, k or basis requires a gradient; "
            "use impl='reference', or torch.no_grad()"
        )
    if kv.k.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"project's Triton kernel runs on CUDA devices, got {kv.k.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug it)"
        )
    if INTERPRETED and kv.k.dtype == torch.bfloat16:
        raise Unsupported("project under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16 or fp32")
