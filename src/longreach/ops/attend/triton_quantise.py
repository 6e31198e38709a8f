"""copy_keys on the GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.attend import triton_quantise_kernels as kernels
from longreach.ops.types import KVView, ScoringKeys

INTERPRETED: bool = kernels.INTERPRETED.value


def copy_keys(seq: Tensor, slot: Tensor, kv: KVView, keys: ScoringKeys) -> None:
    if kv.k.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(f"copy_keys' Triton kernel runs on CUDA devices, got {kv.k.device}; use impl='reference'")
    count, heads, dim = seq.shape[0], kv.heads, kv.k.shape[3]
    if not count:
        return
    seq = seq.contiguous()
    table = seq if kv.block_table is None else kv.block_table
    launch: dict[str, Any] = {} if INTERPRETED else {"launch_pdl": True}
    with torch.cuda.device_of(kv.k):
        kernels.copy_rows[(count,)](
            (kv.k, *kv.k.stride()[:3]), (keys.k, *keys.k.stride()[:3]), (keys.scale, *keys.scale.stride()),
            seq, slot.contiguous(), table, table.stride(0), kv.page, TABLED=kv.block_table is not None,
            G=heads, G2=triton.next_power_of_2(heads), D=dim, D2=triton.next_power_of_2(dim), CHAINED=not INTERPRETED,
            num_warps=4, **launch,
        )  # fmt: skip
