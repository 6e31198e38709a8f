"""append on the GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.append import triton_kernels as kernels

INTERPRETED: bool = kernels.INTERPRETED.value


def append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, page: Tensor, offset: Tensor) -> None:
    if keys.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(f"append's Triton kernel runs on CUDA devices, got {keys.device}; use impl='reference'")
    rows, heads, dim = k.shape
    if not rows:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    launch: dict[str, Any] = {} if INTERPRETED else {"launch_pdl": True}
    with torch.cuda.device_of(keys):
        kernels.append_rows[(rows,)](
            (keys, *keys.stride()[:3]), (values, *values.stride()[:3]), (k, *k.stride()[:2]), (v, *v.stride()[:2]),
            page, page.stride(0), offset, offset.stride(0),
            G=heads, G2=triton.next_power_of_2(heads), D=dim, D2=triton.next_power_of_2(dim), CHAINED=not INTERPRETED,
            num_warps=4, **launch,
        )  # fmt: skip
