# mypy: ignore-errors
"""The Triton kernel that attends to summaries of blocks, and leaves the logits to choose blocks by."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longreach.ops.recall.triton_kernels import LOG2E, range_of
from longreach.ops.triton_pieces import add_keys, write_piece
from longreach.ops.triton_reads import peek


@triton.jit
def attend(
    q, seq_of, start_of, stop_of, memory, values, logits, out, lse, rows, units, scale, G: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    STARTS: tl.constexpr, SCORES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, TABLED: tl.constexpr,
    EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (row and KV head, share): consecutive blocks, of which each share has as many chunks of BN.

    q: (q, row and head stride). memory: (mean keys, page, head and unit stride; blocks of each sequence, block table,
    its row stride); values: (mean values and the same strides). With SCORES logits fp32 [rows, G * GROUP, units] are
    filled. out, lse: a piece for each share; out is left as it is where a share has no blocks. EARLY: the next kernel
    may start at once.
    """
    if CHAINED:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    keys, k_page, k_head, k_unit, held, table, table_row = memory
    v_of, v_page, v_head, v_unit = values
    stream = tl.program_id(0)
    row, g = (stream // G).to(tl.int64), (stream % G).to(tl.int64)
    seq, low, high = range_of(row, row >= 0, seq_of, start_of, stop_of, held, STARTS)
    shares = tl.num_programs(1)
    per = ((tl.maximum(high - low, 0) + BN - 1) // BN + shares - 1) // shares * BN
    begin = low + tl.program_id(1) * per
    end = tl.minimum(begin + per, high)
    m = tl.arange(0, M)
    d = tl.arange(0, D2)
    n = tl.arange(0, BN)
    there, inside = m < GROUP, d < D
    head = g * GROUP + m
    place = (tl.program_id(1).to(tl.int64) * rows + row) * G * GROUP + head
    if begin < end:
        x = tl.load(
            q[0] + row * q[1] + head[:, None] * q[2] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        keys += g * k_head
        v_of += g * v_head
        pages = table + seq.to(tl.int64) * table_row
        if PAGED:
            page = peek(pages + (begin + n) // PAGE, begin + n < end)
        else:
            first = seq.to(tl.int64)
            if TABLED:
                first = tl.load(pages).to(tl.int64)
            keys += first * k_page
            v_of += first * v_page
        to = logits + (row * G * GROUP + head) * units
        peak = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D2), tl.float32)
        for at in tl.range(begin, end, BN, num_stages=STAGES):
            block = at + n
            some = block < end
            if PAGED:
                next_page = peek(pages + (block + BN) // PAGE, block + BN < end)
                at_k = page.to(tl.int64) * k_page + (block % PAGE).to(tl.int64) * k_unit
                at_v = page.to(tl.int64) * v_page + (block % PAGE).to(tl.int64) * v_unit
            else:
                at_k, at_v = block.to(tl.int64) * k_unit, block.to(tl.int64) * v_unit
            k = tl.load(keys + at_k[None, :] + d[:, None], mask=some[None, :] & inside[:, None], other=0.0)
            v = tl.load(v_of + at_v[:, None] + d[None, :], mask=some[:, None] & inside[None, :], other=0.0)
            y = tl.dot(x, k, input_precision="ieee") * scale
            if SCORES:
                tl.store(to[:, None] + block[None, :], y, mask=there[:, None] & some[None, :])
            y = tl.where(some[None, :], y * LOG2E, float("-inf"))
            peak, total, acc = add_keys(peak, total, acc, y, v)
            if PAGED:
                page = next_page
        write_piece(out, lse, place, peak, total, acc, d, there, inside, D)
    else:
        tl.store(lse + place, tl.full((M,), float("-inf"), tl.float32), mask=there)
