"""mix on the GPU, forward and backward: each Partial is read once, and once again by the backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from longreach.errors import Unsupported
from longreach.ops.mix import triton_kernels as kernels
from longreach.ops.mix.api import largest_gap
from longreach.ops.types import Partial

INTERPRETED: bool = kernels.INTERPRETED.value
ROWS = 16  # x heads of a program


def mix(partials: tuple[Partial, ...], weights: Tensor) -> Partial:
    refuse(partials[0].out)
    return Partial(*_Mix.apply(weights, *(p.out for p in partials), *(p.lse for p in partials)))


def refuse(out: Tensor) -> None:
    """Raise Unsupported for what the kernels cannot do and the reference can."""
    if out.dtype == torch.float64:
        raise Unsupported("mix's Triton kernels compute in fp32; for fp64 use impl='reference'")
    if out.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"mix's Triton kernels run on CUDA devices, got {out.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        parts = tuple(x.contiguous() for x in parts)
        out, lse = torch.empty_like(parts[0]), torch.empty_like(parts[-1])
        if lse.numel():
            with torch.cuda.device_of(out):
                given, grid, options = launch(weights, parts)
                kernels.mixed[grid](*given, out, lse, (), *counts(lse), KEEP=False, **options)
        ctx.save_for_backward(weights, out, *parts)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        weights, out, *parts = ctx.saved_tensors
        half = len(parts) // 2
        found = [torch.empty_like(x) for x in parts]
        d_weights = torch.empty(weights.shape, dtype=torch.float32, device=out.device)
        if dlse.numel():
            with torch.cuda.device_of(out):
                given, grid, options = launch(weights, tuple(parts))
                results = out, dout.contiguous(), dlse.contiguous(), tuple(found[:half]), tuple(found[half:]), d_weights
                kernels.gradients[grid](*given, *results, *counts(dlse), **options)
        return d_weights.to(weights.dtype), *found


def counts(lse: Tensor) -> tuple[int, int, float]:
    return lse.shape[1], lse.numel(), largest_gap(lse.dtype)


def launch(weights: Tensor, parts: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], tuple[int], dict[str, int]]:
    """Inputs, grid and constants that both kernels take."""
    half, dim = len(parts) // 2, parts[0].shape[2]
    given = parts[:half], parts[half:], weights, weights.stride()
    options = {"S": half, "M": ROWS, "D": dim, "BD": triton.next_power_of_2(dim), "num_warps": 1 if INTERPRETED else 4}
    return given, (triton.cdiv(parts[-1].numel(), ROWS),), options
