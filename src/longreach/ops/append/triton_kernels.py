# mypy: ignore-errors
"""The Triton kernel of append."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def append_rows(
    keys, values, k, v, page_of, page_stride, offset_of, offset_stride,
    G: tl.constexpr, G2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, all heads. keys, values: (memory, page, head and slot stride); k, v: (rows, row and head stride)."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, G2)[:, None]
    d = tl.arange(0, D2)[None, :]
    there = (g < G) & (d < D)
    if CHAINED:  # the next kernel may start before this one has waited: what it reads before its own wait are guesses
        gdc_launch_dependents()
        gdc_wait()
    page = tl.load(page_of + row * page_stride).to(tl.int64)
    offset = tl.load(offset_of + row * offset_stride).to(tl.int64)
    x = tl.load(k[0] + row * k[1] + g * k[2] + d, mask=there)
    y = tl.load(v[0] + row * v[1] + g * v[2] + d, mask=there)
    tl.store(keys[0] + page * keys[1] + g.to(tl.int64) * keys[2] + offset * keys[3] + d, x, mask=there)
    tl.store(values[0] + page * values[1] + g.to(tl.int64) * values[2] + offset * values[3] + d, y, mask=there)
