"""place on the GPU."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.place import triton_kernels as kernels
from longreach.ops.rope import RotaryAngles

INTERPRETED: bool = kernels.INTERPRETED.value


def place(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor, angles: RotaryAngles
) -> None:
    if keys.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(f"place's Triton kernel runs on CUDA devices, got {keys.device}; use impl='reference'")
    if keys.dtype == torch.float64:
        raise Unsupported("place's Triton kernel computes in fp32; for fp64 use impl='reference'")
    rows, heads, dim = k.shape
    if not rows:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    with torch.cuda.device_of(keys):
        kernels.place_rows[(rows,)](
            (keys, *keys.stride()[:3]), (values, *values.stride()[:3]), (k, *k.stride()[:2]), (v, *v.stride()[:2]),
            page, page.stride(0), offset, offset.stride(0), (angles.cos, *angles.cos.stride()),
            (angles.sin, *angles.sin.stride()), PAIRS=angles.cos.shape[1], HALF=angles.layout == "half",
            G=heads, G2=triton.next_power_of_2(heads), D=dim, D2=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
