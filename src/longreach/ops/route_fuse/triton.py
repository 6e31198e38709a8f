"""route_fuse on the GPU, in one launch that depends on no length. Nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.carry import CarryMemory
from longreach.ops.checks import refuse_gradients
from longreach.ops.route_fuse import triton_kernels as kernels
from longreach.ops.route_fuse.api import RouterLayer
from longreach.ops.types import accumulator

INTERPRETED: bool = kernels.INTERPRETED.value
CHAINED = not INTERPRETED
CHANNELS = 4096  # of a weight's row that a program of first_layer holds at once


def route_fuse(
    k: Tensor, v: Tensor, router: RouterLayer, decay: Tensor | None, seq: Tensor, pos: Tensor, memory: CarryMemory,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    learnt = [*router.tensors(), *([] if decay is None else [decay])]
    refuse(k, *learnt)
    refuse_gradients("route_fuse", k, v, *learnt)
    rows, heads, dim = k.shape
    sequences = len(memory.slots)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    mixed_k, mixed_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    weights = k.new_empty(rows, 2, dtype=accumulator(k.dtype))
    programs = max(rows, sequences)
    if not programs:
        return mixed_k, mixed_v, weights
    width = 1 if router.hidden is None else router.hidden.shape[1]
    layer = tuple((router.gate if x is None else x).contiguous() for x in (router.hidden, router.weight, router.bias))
    means = (memory.mean, memory.weight, *(x.contiguous() for x in (memory.slots, memory.before, memory.after)))
    chained = _chained(*learnt)
    wide = triton.next_power_of_2(width)
    with torch.cuda.device_of(k):
        kernels.route_fuse[(programs, heads)](
            (k, *k.stride()[:2]), (v, *v.stride()[:2]), mixed_k, mixed_v, weights, router.gate.contiguous(), layer,
            router.gate if decay is None else decay.contiguous(), means, seq.contiguous(), pos.contiguous(),
            rows, sequences, memory.mean.shape[1], LIMIT=limit, FORGETS=decay is not None,
            ROUTED=router.hidden is not None, HARD=router.hard, D=dim, D2=triton.next_power_of_2(dim), W=width, W2=wide,
            num_warps=min(8, max(1, wide // 256)), **chained,
        )  # fmt: skip
    return mixed_k, mixed_v, weights


def first_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = [x, weight] if bias is None else [x, weight, bias]
    refuse(*given)
    refuse_gradients("first_layer", *given)
    x = x.contiguous()
    out = x.new_empty(len(x), len(weight))
    if not len(x):
        return out
    block = min(CHANNELS, max(16, triton.next_power_of_2(x.shape[1])))
    chained = _chained(*given[2:])
    with torch.cuda.device_of(x):
        kernels.first_layer[(len(weight), len(x))](
            x, weight, weight.stride(0), weight if bias is None else bias.contiguous(), out, BIASED=bias is not None,
            K=x.shape[1], BK=block, num_warps=max(1, min(4, block // 256)), **chained,
        )  # fmt: skip
    return out


def _chained(*parameters: Tensor) -> dict[str, Any]:
    """Options of a kernel that reads these before it waits for the one before, unless that one makes copies of them."""
    early = CHAINED and all(x.is_contiguous() for x in parameters)
    return {"CHAINED": True, "launch_pdl": True} if early else {"CHAINED": False}


def refuse(k: Tensor, *learnt: Tensor) -> None:
    """Raise Unsupported for what the kernel cannot do and the reference can."""
    if any(x.dtype == torch.float64 for x in (k, *learnt)):
        raise Unsupported("route_fuse's Triton kernels compute in fp32; for fp64 use impl='reference'")
    if k.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"route_fuse's Triton kernels run on CUDA devices, got {k.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and any(x.dtype == torch.bfloat16 for x in (k, *learnt)):
        raise Unsupported("route_fuse under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16, or fp32")
