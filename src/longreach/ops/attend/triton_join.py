# mypy: ignore-errors
"""Two results over different keys as one, in a single pass over memory (ops.partial.merge)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    """Write the merge of two results that have keys in every row.

    first, second: out [1, H, T, D] and lse fp32 [1, H, T]. out: fp32 [T, H, D], lse: fp32
    [T, H], both contiguous.
    """
    rows, heads, dim = out.shape
    if not out.numel():
        return
    dense = [(o if o.stride(3) == 1 else o.contiguous(), x) for o, x in (first, second)]
    given = [(o, o.stride(2), o.stride(1), x, x.stride(2), x.stride(1)) for o, x in dense]
    with torch.cuda.device_of(out):
        _join[(rows,)](
            *given, out, lse, heads, H2=triton.next_power_of_2(heads), D=dim, D2=triton.next_power_of_2(dim),
            num_warps=8,
        )  # fmt: skip


@triton.jit
def _read(result, row, h, d, heads, D: tl.constexpr):
    """Values [H2, D2] in fp32 and lse [H2] of a row."""
    out, row_stride, head_stride, lse, lse_row, lse_head = result
    there = h < heads
    cells = out + row.to(tl.int64) * row_stride + h[:, None] * head_stride + d[None, :]
    x = tl.load(cells, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return x, tl.load(lse + row.to(tl.int64) * lse_row + h * lse_head, mask=there, other=0.0)


@triton.jit
def _join(first, second, out, lse, heads, H2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr):
    """Program: a row, all of its heads."""
    row = tl.program_id(0)
    h, d = tl.arange(0, H2).to(tl.int64), tl.arange(0, D2)
    a, a_lse = _read(first, row, h, d, heads, D)
    b, b_lse = _read(second, row, h, d, heads, D)
    high = tl.maximum(a_lse, b_lse)
    one, two = tl.exp2((a_lse - high) * LOG2E), tl.exp2((b_lse - high) * LOG2E)
    total = one + two
    place = row.to(tl.int64) * heads + h
    x = a * (one / total)[:, None] + b * (two / total)[:, None]
    tl.store(out + place[:, None] * D + d[None, :], x, mask=(h < heads)[:, None] & (d < D)[None, :])
    tl.store(lse + place, high + tl.log2(total) * LN2, mask=h < heads)
