# mypy: ignore-errors
"""The Triton kernel of place."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit
def place_rows(
    keys, values, k, v, page_of, page_stride, offset_of, offset_stride, cos, sin,
    PAIRS: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, G2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """One row, all heads. keys, values: (memory, page, head and slot stride); k, v: (rows, row and head stride);
    cos, sin: (memory, row and pair stride). A channel is read beside the other one of its pair, which the L1 holds.
    """
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, G2)[:, None]
    d = tl.arange(0, D2)[None, :]
    there = (g < G) & (d < D)
    turned = d < 2 * PAIRS
    first = (d < PAIRS) if HALF else (d % 2 == 0)
    pair = tl.where(d < PAIRS, d, d - PAIRS) if HALF else d // 2
    step = PAIRS if HALF else 1
    other = tl.where(first, d + step, d - step)
    page = tl.load(page_of + row * page_stride).to(tl.int64)
    offset = tl.load(offset_of + row * offset_stride).to(tl.int64)
    x = tl.load(k[0] + row * k[1] + g * k[2] + d, mask=there)
    y = tl.load(v[0] + row * v[1] + g * v[2] + d, mask=there)
    if PAIRS:
        z = tl.load(k[0] + row * k[1] + g * k[2] + other, mask=there & turned).to(tl.float32)
        c = tl.load(cos[0] + row * cos[1] + pair * cos[2], mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin[0] + row * sin[1] + pair * sin[2], mask=turned, other=0.0).to(tl.float32)
        rotated = x.to(tl.float32) * c + z * tl.where(first, -s, s)
        x = tl.where(turned, rotated.to(x.dtype), x)
    tl.store(keys[0] + page * keys[1] + g.to(tl.int64) * keys[2] + offset * keys[3] + d, x, mask=there)
    tl.store(values[0] + page * values[1] + g.to(tl.int64) * values[2] + offset * values[3] + d, y, mask=there)
