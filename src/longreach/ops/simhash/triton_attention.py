"""attend_sampled on the GPU, in four kernels, codes included. Nothing waits for the device; all may be captured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from longreach.ops.simhash import triton_attention_kernels as kernels
from longreach.ops.simhash.attention import (
    BUCKETS,
    HEADS,
    NUMBERS,
    ROOM,
    SPLITS,
    counters,
    look_up_bytes,
    shares_counters,
    words,
)
from longreach.ops.simhash.probability import TINY, form
from longreach.ops.simhash.tables import HashTables
from longreach.ops.simhash.triton import INTERPRETED, refuse
from longreach.ops.simhash.triton import codes as triton_codes
from longreach.ops.types import KVView, Partial, Rows


@dataclass(frozen=True)
class Tuning:
    """room: words of counters, at most ROOM; buckets: looked up at a time, at most, a power of 2; pieces: of 8 ids,
    read at a time; scanned: words of a round, at most `room`; keys: attended to at a time; stages: loads of keys begin
    so many rounds ahead; splits: programs that attend where a list is too long; merged: parts merged at a time, at
    most; warps: of a program that attends.
    """

    room: int = ROOM
    buckets: int = BUCKETS
    pieces: int = 256
    scanned: int = 4096
    keys: int = 32
    stages: int = 2
    splits: int = SPLITS
    merged: int = 128
    warps: int = 8


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None, tune: Tuning | None = None,
) -> tuple[Partial, None, Tensor]:  # fmt: skip
    refuse(rows.q, kv.k, kv.v)
    t, device = tune or Tuning(), rows.q.device
    count, heads, dim = rows.q.shape
    group, columns = heads // kv.heads, tables.ids.shape[3]
    width = words(group, tables.tables)
    part = t.room // width
    parts = triton.cdiv(columns, part)
    buckets = min(t.buckets, triton.next_power_of_2(group * tables.tables))
    pieces, dims = parts + t.splits, max(16, triton.next_power_of_2(dim))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, kv.heads, *shape, dtype=dtype, device=device)

    out, lse = torch.empty(count, heads, dim, device=device), torch.empty(count, heads, device=device)
    numbers = empty(len(NUMBERS), dtype=torch.int64)
    if count:
        top, total, sums = empty(pieces, HEADS), empty(pieces, HEADS), empty(pieces, HEADS, dims)
        counts, scratch = empty(parts, HEADS + 3, dtype=torch.int32), empty(parts, part, dtype=torch.int32)
        shared, memory = shares_counters(dim, kv.k.element_size()), scratch
        if not shared:
            memory = empty(parts, t.room + 3 * buckets, dtype=torch.int32)
        elif INTERPRETED:  # which has no shared memory
            memory = torch.from_numpy(np.empty((count, kv.heads, parts, t.room + 3 * buckets), np.int32))
        q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
        codes = triton_codes(q, projections, None)
        seq, pos, where, table = rows.seq.contiguous(), rows.pos.contiguous(), slots.contiguous(), kv.block_table
        view = (
            kv.k, kv.k.stride()[:3], kv.v, kv.v.stride()[:3], kv.seq_lens if table is None else table,
            0 if table is None else table.stride(0), kv.seq_lens,
        )  # fmt: skip
        strides = tables.ids.stride()[:3]
        whole = all(n % 8 == 0 for n in (columns, *strides)) and tables.ids.data_ptr() % 16 == 0
        f = form(tables.tables, least)
        law = tables.tables, least, tables.bits, f.split, f.scale, f.ratios, f.binomials
        shape = {"GROUP": group, "D": dim, "D2": dims}
        paged = {"PAGED": table is not None, "PAGE": kv.page, "SOFTCAP": float(softcap or 0.0)}
        items = count * kv.heads
        with torch.cuda.device_of(q):
            kernels.attend_parts[(items, parts)](
                q, q.stride()[:2], *view, centre, codes, tables.ids, strides, tables.offsets,
                tables.offsets.stride()[:4], where, seq, pos, tables.stop, memory, scratch, top, total, sums, counts,
                kv.heads, tables.first, sinks, least, max(floor, TINY), scale, parts, pieces, **shape, OWN=own, **paged,
                TABLES=tables.tables, SIZE=tables.size, PER=counters(tables.tables), WORDS=width, LAW=law, ROOM=t.room,
                SHARED=shared and not INTERPRETED, WHOLE=whole, LOG=buckets.bit_length() - 1, BE=t.pieces,
                BN=t.scanned // width, BC=t.keys, STAGES=t.stages, num_warps=t.warps,
            )  # fmt: skip
            kernels.attend_rest[(items, t.splits)](
                q, q.stride()[:2], *view, where, seq, pos, tables.stop, limit, counts, numbers, top,
                total, sums, kv.heads, tables.first, sinks, scale, parts, look_up_bytes(group, tables),
                BP=triton.next_power_of_2(parts), OWN=own, **shape, **paged, SIZE=tables.size, SPLITS=t.splits,
                BC=t.keys,
            )  # fmt: skip
            kernels.merge_parts[(items, group)](
                top, total, sums, counts, limit, out, lse, kv.heads, parts, t.splits, **shape, OWN=own,
                BP=triton.next_power_of_2(parts), BM=min(t.merged, triton.next_power_of_2(max(parts, t.splits))),
            )  # fmt: skip
    return Partial(out, lse), None, numbers
