# mypy: ignore-errors
"""The Triton kernel of project."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors


@triton.jit(do_not_specialize=["rows"])
def project_rows(
    q, seq_of, slot_of, memory, basis, projected, rows, GROUP: tl.constexpr, GROUP2: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, WIDTH: tl.constexpr,
    BW: tl.constexpr, QUERIES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (TILE rows, KV head, BW columns of the basis): the rows' keys and, with QUERIES, their GROUP queries.

    q: (q, row and head stride); memory: (k and out, each with page, head and slot stride; filled, block table, its row
    stride); basis: (basis, head and channel stride); projected [R, G * GROUP, WIDTH].
    """
    k, k_page, k_head, k_slot, out, out_page, out_head, out_slot, filled, table, table_row = memory
    if CHAINED:  # few programs in a decode step: the next kernel may start beside them
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D2)
    w = tl.program_id(2) * BW + tl.arange(0, BW)
    b = tl.load(
        basis[0] + g * basis[1] + d[:, None] * basis[2] + w[None, :],
        mask=(d < D)[:, None] & (w < WIDTH)[None, :],
        other=0.0,
    )
    n = tl.arange(0, KEYS)
    row = tile * TILE + n
    there = (n < TILE) & (row < rows)
    seq = tl.load(seq_of + row, mask=there, other=0).to(tl.int32)
    slot = tl.load(slot_of + row, mask=there, other=-1).to(tl.int32)
    there = there & (slot >= 0) & (slot < tl.load(filled + seq, mask=there, other=0))
    page = seq.to(tl.int64)
    if TABLED:
        number = slot // PAGE if PAGED else tl.zeros_like(slot)
        page = tl.load(table + page * table_row + number, mask=there, other=0).to(tl.int64)
    if PAGED:
        slot = slot % PAGE
    from_k = k + page * k_page + g * k_head + slot.to(tl.int64) * k_slot
    x = tl.load(from_k[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    y = tl.dot(x, b, input_precision="ieee")
    to = out + page * out_page + g * out_head + slot.to(tl.int64) * out_slot
    tl.store(to[:, None] + w[None, :], y.to(out.dtype.element_ty), mask=there[:, None] & (w < WIDTH)[None, :])
    if QUERIES:
        QUERY: tl.constexpr = TILE * GROUP2 if TILE * GROUP2 > 16 else 16
        i = tl.arange(0, QUERY)
        of_row = tile * TILE + i // GROUP2
        head = g * GROUP + i % GROUP2
        asked = (i < TILE * GROUP2) & (of_row < rows) & (i % GROUP2 < GROUP)
        from_q = q[0] + of_row.to(tl.int64) * q[1] + head * q[2]
        z = tl.load(from_q[:, None] + d[None, :], mask=asked[:, None] & (d < D)[None, :], other=0.0)
        z = tl.dot(z, b, input_precision="ieee").to(projected.dtype.element_ty)
        at = (of_row.to(tl.int64) * tl.num_programs(1) * GROUP + head) * WIDTH
        tl.store(projected + at[:, None] + w[None, :], z, mask=asked[:, None] & (w < WIDTH)[None, :])
