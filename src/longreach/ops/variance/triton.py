"""sampling_variance on the GPU. Nothing waits for the device; it may be captured."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.selection import Lists
from longreach.ops.types import KVView, Partial, Rows
from longreach.ops.variance import triton_kernels as kernels
from longreach.ops.variance.api import list_numbers

INTERPRETED: bool = kernels.INTERPRETED.value
KEYS = 32  # of a program's round
PROGRAMS = 512  # lists are cut into pieces until there are about as many


def sampling_variance(
    rows: Rows, kv: KVView, lists: Lists, factor: Tensor, whole: Partial, *, scale: float, softcap: float | None,
    keys: int = KEYS,
) -> Tensor:  # fmt: skip
    refuse(rows, kv, whole)
    count, heads, dim = rows.q.shape
    width, number = list_numbers(rows, kv, lists)
    units, room, weight = heads // width, lists.index.shape[2], lists.log_weight
    if not (count and room):
        return torch.zeros(count, heads, device=kv.k.device)
    pieces = max(1, min(triton.cdiv(room, keys), PROGRAMS // (count * units)))
    found = torch.empty(count * units, pieces, width, device=kv.k.device)
    table = kv.block_table
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    with torch.cuda.device_of(kv.k):
        kernels.deviations[(count * units, pieces)](
            (q, *q.stride()[:2], rows.seq.contiguous(), rows.pos.contiguous()),
            (kv.k, kv.k.stride()[:3], kv.v, kv.v.stride()[:3], kv.seq_lens.contiguous()),
            kv.seq_lens if table is None else table, 0 if table is None else table.stride(0),
            (number, lists.index.contiguous(), lists.count.contiguous(), factor.contiguous()),
            factor if weight is None else weight.contiguous(), whole.out.contiguous(), whole.lse.contiguous(), found,
            room, units, pieces, scale, softcap or 1.0, WIDTH=width, W2=triton.next_power_of_2(width),
            PER_KV=units // kv.heads, D=dim, D2=triton.next_power_of_2(dim), PAGED=table is not None, PAGE=kv.page,
            WEIGHTED=weight is not None, CAPPED=softcap is not None, BC=keys,
        )  # fmt: skip
    return found.sum(1).view(count, heads)  # of pieces in order, so the same at each call


def refuse(rows: Rows, kv: KVView, whole: Partial) -> None:
    """Raise Unsupported for what the kernel cannot do and the reference can."""
    if torch.float64 in (kv.k.dtype, whole.out.dtype):
        raise Unsupported("sampling_variance's Triton kernel computes in fp32; for fp64 use impl='reference'")
    if kv.k.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"sampling_variance's Triton kernel runs on CUDA devices, got {kv.k.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug it)"
        )
    if INTERPRETED and torch.bfloat16 in (rows.q.dtype, kv.k.dtype):
        raise Unsupported("sampling_variance under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16, fp32")
