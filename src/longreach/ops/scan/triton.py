"""scan on the GPU, forward and backward. Nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from longreach.errors import Unsupported
from longreach.ops.scan import triton_kernels as kernels
from longreach.ops.scan.api import ScanCarry

INTERPRETED: bool = kernels.INTERPRETED.value
ROWS = 8 if INTERPRETED else 256  # of a chunk
AT_ONCE = 2 if INTERPRETED else 8  # rows whose loads are under way together
CHAINED = 2 if INTERPRETED else 16  # chunks, likewise


def scan(x: Tensor, decay: Tensor | None, seq: Tensor, pos: Tensor, carry: ScanCarry) -> tuple[Tensor, ScanCarry]:
    refuse(x)
    rate = torch.ones(x.shape[1], device=x.device) if decay is None else decay
    source, last = _neighbours(seq, pos, carry.mean.shape[0])
    y, mean, weight = _Scan.apply(x, rate, carry.mean, carry.weight, source, last)
    return y, ScanCarry(mean, weight)


def refuse(x: Tensor) -> None:
    """Raise Unsupported for what the kernels cannot do and the reference can."""
    if x.dtype == torch.float64:
        raise Unsupported("scan's Triton kernels compute in fp32; for fp64 use impl='reference'")
    if x.device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"scan's Triton kernels run on CUDA devices, got {x.device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise Unsupported("scan under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16, or fp32")


def _neighbours(seq: Tensor, pos: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    """int32 [R] each: where each row's state comes from, and whose last row it is; see the kernels."""
    new = torch.ones_like(seq, dtype=torch.bool)
    new[1:] = seq[1:] != seq[:-1]
    source = torch.where(new, seq, kernels.GOES_ON.value)
    source = torch.where(pos == 0, kernels.FRESH.value, source)
    outside = (seq < 0) | (seq >= sequences)
    source = torch.where(outside, kernels.PADDING.value, source).int()
    return source, torch.where(outside | ~new.roll(-1), -1, seq).int()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rate: Tensor, mean: Tensor, weight: Tensor, source: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x if x.stride(2) == 1 else x.contiguous()
        carry = mean.contiguous(), weight.contiguous()
        rate = rate.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, heads, _ = x.shape
        weights = [torch.empty(rows, heads, device=x.device) for _ in range(2)]  # W and its derivative in the decay
        ended = carry[0].clone(), carry[1].clone()
        if rows:
            with torch.cuda.device_of(x):
                _forward(x, rate, source, last, carry, y, weights, ended)
        ctx.save_for_backward(x, rate, *carry, source, last, y, *weights)
        ctx.set_materialize_grads(False)
        return y, *ended

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, d_mean: Tensor | None, d_weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, rate, mean, weight, source, last, y, w, v = ctx.saved_tensors
        needs = ctx.needs_input_grad
        learnt = needs[1] or needs[3]
        dy = torch.zeros_like(y) if dy is None else dy.contiguous()
        dx, d_carry = torch.empty_like(y), torch.zeros_like(mean)
        dw = torch.zeros_like(w)  # of each row's W
        if x.shape[0]:
            with torch.cuda.device_of(x):
                _backward(dy, d_mean, x, y, (w, v), rate, source, last, (mean, weight), learnt, (dx, d_carry, dw))
        d_start = torch.zeros_like(weight)
        seq, ending = last.long(), last >= 0
        sequences = mean.shape[0]
        moved = torch.zeros(sequences + 1, dtype=torch.bool, device=x.device)  # a sequence without rows keeps its carry
        moved = moved.index_fill(0, torch.where(ending, seq, sequences), True)[:-1]
        if d_mean is not None:
            d_carry = d_carry + d_mean.masked_fill(moved[:, None, None], 0.0)
        if d_weight is not None and sequences:
            dw = dw + torch.where(ending[:, None], d_weight[seq.clamp(min=0)], 0.0)
            d_start = d_weight.masked_fill(moved[:, None], 0.0)
        if needs[3] and sequences and x.shape[0]:
            d_start = d_start + _of_carried(dw, rate, source, sequences)
        d_rate = (dw * v).sum(0).to(rate.dtype) if needs[1] else None
        return dx, d_rate, d_carry, d_start, None, None


def _of_carried(dw: Tensor, rate: Tensor, source: Tensor, sequences: int) -> Tensor:
    """[B, G]: the gradient of the carry's weight, which reaches the n-th row after it by decay^n."""
    row = torch.arange(source.shape[0], device=source.device)
    start = torch.where(source == kernels.GOES_ON.value, 0, row).cummax(0).values
    seq = source[start].long()
    part = dw * rate.float() ** (row - start + 1)[:, None]
    part = torch.where(seq[:, None] >= 0, part, 0.0)
    # on a GPU accumulation sorts its indices: the same bits each time
    return dw.new_zeros(sequences, dw.shape[1]).index_put_((seq.clamp(min=0),), part, accumulate=True)


def _forward(
    x: Tensor, rate: Tensor, source: Tensor, last: Tensor, carry: tuple[Tensor, Tensor], y: Tensor,
    weights: list[Tensor], ended: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill y, weights (W and its derivative) and the state after the last rows."""
    rows, heads, dim = x.shape
    form, chunks, options = _form(rows, dim)
    begins = carry  # not read by a single chunk
    given = x, *x.stride()[:2], rate, source
    if chunks > 1:
        effects, begins = _states(chunks, heads, dim, x.device), _states(chunks, heads, dim, x.device)
        kernels.ends[(chunks, heads)](*given, carry, effects, rows, heads, **form, **options)
        _chain(effects, begins, back=False)
    kernels.means[(chunks, heads)](
        *given, last, carry, begins, y, tuple(weights), ended, rows, heads, BEGUN=chunks > 1, **form, **options
    )


def _backward(
    dy: Tensor, d_mean: Tensor | None, x: Tensor, y: Tensor, weights: tuple[Tensor, Tensor], rate: Tensor,
    source: Tensor, last: Tensor, carry: tuple[Tensor, Tensor], learnt: bool, found: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill the gradients of x, of the carry's mean and (if `learnt`) of each row's W."""
    rows, heads, dim = x.shape
    form, chunks, options = _form(rows, dim)
    ended = dy if d_mean is None else d_mean.contiguous()
    begins = carry
    if chunks > 1:
        effects, begins = _states(chunks, heads, dim, x.device), _states(chunks, heads, dim, x.device)
        kernels.ends_back[(chunks, heads)](
            dy, ended, weights[0], rate, source, last, effects, rows, heads, ENDED=d_mean is not None, **form, **options
        )
        _chain(effects, begins, back=True)
    kernels.gradients[(chunks, heads)](
        dy, ended, x, *x.stride()[:2], y, weights[0], rate, source, last, carry, begins, *found, rows, heads,
        BEGUN=chunks > 1, ENDED=d_mean is not None, LEARNT=learnt, **form, **options,
    )  # fmt: skip


def _form(rows: int, dim: int) -> tuple[dict[str, int], int, dict[str, int]]:
    wide = triton.next_power_of_2(dim)
    return {"D": dim, "BD": wide, "C": ROWS, "U": AT_ONCE}, triton.cdiv(rows, ROWS), {"num_warps": max(1, wide // 256)}


def _states(chunks: int, heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(chunks, heads, dim, device=device), torch.empty(chunks, heads, 4, device=device)


def _chain(effects: tuple[Tensor, Tensor], begins: tuple[Tensor, Tensor], *, back: bool) -> None:
    chunks, heads, dim = effects[0].shape
    wide = triton.next_power_of_2(dim)
    kernels.chain[(heads,)](
        effects, begins, chunks, heads, BACK=back, D=dim, BD=wide, U=CHAINED, num_warps=max(1, wide // 256)
    )
