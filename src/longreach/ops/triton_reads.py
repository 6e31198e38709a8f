# mypy: ignore-errors
"""Reads of memory for Triton kernels of several ops."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def peek(at, mask):
    """tl.load of integers, 0 where masked, that the software pipeliner leaves where it stands."""
    if INTERPRETED:
        x = tl.load(at, mask=mask, other=0)
    elif at.dtype.element_ty == tl.int64:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; @p ld.global.b64 $0, [$1]; }",
            "=l,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int64, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=r,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return x
