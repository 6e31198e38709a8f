# mypy: ignore-errors
"""pack_lists on the GPU: entries are read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach.errors import Unsupported

INTERPRETED: bool = triton.knobs.runtime.interpret


@triton.jit
def pack(index, used, offsets, into, capacity, B: tl.constexpr):
    """Program (list, stretch of B entries)."""
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    start, stop = tl.load(offsets + number).to(tl.int64), tl.load(offsets + number + 1).to(tl.int64)
    kept = (at < tl.load(used + number)) & (start + at < stop)
    tl.store(into + start + at, tl.load(index + number * capacity + at, mask=kept, other=0), mask=kept)


def pack_lists(index: Tensor, used: Tensor, offsets: Tensor, into: Tensor) -> None:
    if index.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"pack_lists' Triton kernel runs on CUDA devices, got {index.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug it)"
        )
    if not used.numel():
        return
    block = 64 if INTERPRETED else 1024
    with torch.cuda.device_of(index):
        pack[(used.numel(), triton.cdiv(index.shape[2], block))](
            index.contiguous(), used.contiguous(), offsets.contiguous(), into, index.shape[2], B=block, num_warps=4
        )
