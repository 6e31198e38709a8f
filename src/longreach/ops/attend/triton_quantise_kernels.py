# mypy: ignore-errors
"""The Triton kernel of copy_keys."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
HALVES = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to a whole number, halves to even ones


@triton.jit
def copy_rows(
    k, codes, scale, seq_of, pos_of, table, table_row, page_size, TABLED: tl.constexpr, G: tl.constexpr,
    G2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, all heads. k, codes, scale: (memory, page, head and slot stride)."""
    row = tl.program_id(0)
    g = tl.arange(0, G2)
    d = tl.arange(0, D2)[None, :]
    there = (g[:, None] < G) & (d < D)
    if CHAINED:
        gdc_wait()
    page = tl.load(seq_of + row).to(tl.int64)
    slot = tl.load(pos_of + row).to(tl.int64)
    if TABLED:
        page = tl.load(table + page * table_row + slot // page_size).to(tl.int64)
    slot = slot % page_size
    head = g.to(tl.int64)
    at = page * k[1] + head * k[2] + slot * k[3]
    x = tl.load(k[0] + at[:, None] + d, mask=there, other=0.0).to(tl.float32)
    step = tl.math.div_rn(tl.max(tl.abs(x), 1), 127.0)
    whole = tl.math.div_rn(x, tl.where(step == 0, 1.0, step)[:, None])
    whole = tl.minimum(tl.maximum((whole + HALVES) - HALVES, -127.0), 127.0)
    at = page * codes[1] + head * codes[2] + slot * codes[3]
    tl.store(codes[0] + at[:, None] + d, whole.to(tl.int8), mask=there)
    tl.store(scale[0] + page * scale[1] + head * scale[2] + slot * scale[3], step, mask=g < G)
    if CHAINED:  # last: attention comes next
        gdc_launch_dependents()
