# mypy: ignore-errors
"""The Triton kernels that copy between GPU and host memory."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def copy_all(sources, targets, sizes, BLOCK: tl.constexpr):
    """Block program_id(0) of tensor program_id(1). sources, targets: flat, of one dtype each pair; sizes: elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(sources)):
        if tl.program_id(1) == i:
            here = at < sizes[i]
            tl.store(targets[i] + at, tl.load(sources[i] + at, mask=here), mask=here)


@triton.jit
def copy_lists(source, target, count, room, BLOCK: tl.constexpr):
    """Block program_id(1) of list program_id(0): of source [lists, room] what is in use. More than room: nothing."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(count + row)
    first = tl.program_id(1) * BLOCK
    if (n <= room) & (first < n):
        at = first + tl.arange(0, BLOCK)
        here = at < n
        x = tl.load(source + row * room + at, mask=here)
        tl.store(target + row * room + at, x.to(target.dtype.element_ty), mask=here)
