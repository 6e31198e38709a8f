"""attend_sampled on the GPU, in four kernels, codes included. Nothing waits for the device; all may be captured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from longreach.ops.simhash.attention import (
    BUCKETS,
    HEADS,
    NUMBERS,
    ROOM,
    counters,
    look_up_bytes,
    splits_of,
    words,
)
from longreach.ops.simhash.probability import TINY
from longreach.ops.simhash.tables import HashTables
from longreach.ops.simhash.triton import INTERPRETED, law, refuse
from longreach.ops.simhash.triton import codes as triton_codes
from longreach.ops.simhash.triton_attention_kernels import attend_parts, merge_parts
from longreach.ops.simhash.triton_search_kernels import search_parts
from longreach.ops.types import KVView, Partial, Rows


@dataclass(frozen=True)
class Tuning:
    """room: words of counters, at most ROOM; buckets: looked up at a time, at most, a power of 2; pieces: of buckets,
    read at a time; each: ids of a piece, a power of 2; scanned: words of a round, at most `room`; search_warps: of a
    program that looks up; vector: bytes of keys attended to at a time; splits: programs that attend to a part's keys
    (None: by `splits_of`); warps: of a program that attends; merged: parts merged at a time, at most; chained: whether
    a kernel may start while the one before it runs, and then waits.
    """

    room: int = ROOM
    buckets: int = BUCKETS
    pieces: int = 256
    each: int = 8
    scanned: int = 1024
    search_warps: int = 8
    vector: int = 8192
    splits: int | None = None
    warps: int = 4
    merged: int = 128
    chained: bool = not INTERPRETED


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
    items, parts = count * kv.heads, triton.cdiv(columns, part)
    splits = t.splits or splits_of(items, parts)
    buckets = min(t.buckets, triton.next_power_of_2(group * tables.tables))
    pieces, dims = parts * splits, max(16, triton.next_power_of_2(dim))
    keys = max(16, t.vector // (dims * kv.k.element_size()))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, kv.heads, *shape, dtype=dtype, device=device)

    out, lse = torch.empty(count, heads, dim, device=device), torch.empty(count, heads, device=device)
    numbers = empty(len(NUMBERS), dtype=torch.int64)
    if count:
        top, total, sums = empty(pieces, group), empty(pieces, group), empty(pieces, group, dims)
        counts, found = empty(parts, HEADS + 3, dtype=torch.int32), empty(parts, part, dtype=torch.int32)
        wide, memory = triton.next_power_of_2(group), (found, found)
        if INTERPRETED:  # which has no shared memory
            sizes = parts * (t.room + 3 * buckets + 2 * t.pieces), pieces * (keys * (wide + 1) + 1)
            memory = tuple(torch.from_numpy(np.empty(items * size, np.int32)) for size in sizes)
        q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
        codes = triton_codes(q, projections, None, chained=t.chained)
        how = {"CHAINED": t.chained} | ({"launch_pdl": True} if t.chained else {})
        seq, pos, where, table = rows.seq.contiguous(), rows.pos.contiguous(), slots.contiguous(), kv.block_table
        view = (
            kv.k, kv.k.stride()[:3], kv.v, kv.v.stride()[:3], kv.seq_lens if table is None else table,
            0 if table is None else table.stride(0), kv.seq_lens,
        )  # fmt: skip
        strides = tables.ids.stride()[:3]
        whole = all(n % t.each == 0 for n in (columns, tables.size, *strides)) and tables.ids.data_ptr() % 16 == 0
        with torch.cuda.device_of(q):
            search_parts[(items, parts)](
                codes, tables.ids, strides, tables.offsets, tables.offsets.stride()[:4], where, seq, pos, kv.seq_lens,
                tables.stop, memory[0], found, counts, kv.heads, tables.first, least, parts, GROUP=group,
                TABLES=tables.tables, SIZE=tables.size, PER=counters(tables.tables), WORDS=width, ROOM=t.room,
                WHOLE=whole, LOG=buckets.bit_length() - 1, BE=t.pieces, EACH=t.each, BN=t.scanned // width,
                num_warps=t.search_warps, **how,
            )  # fmt: skip
            attend_parts[(items, pieces)](
                q, q.stride()[:2], *view, centre, where, seq, pos, tables.stop, limit, found, counts, memory[1],
                numbers, top, total, sums, kv.heads, tables.first, sinks, max(floor, TINY), scale, parts,
                look_up_bytes(group, tables), GROUP=group, OWN=own, D=dim, D2=dims, PAGED=table is not None,
                PAGE=kv.page, SIZE=tables.size, LAW=law(tables, least), SOFTCAP=float(softcap or 0.0), PART=part,
                SPLITS=splits, BP=triton.next_power_of_2(parts), BC=keys, WIDE=wide,
                num_warps=t.warps, **how,
            )  # fmt: skip
            merge_parts[(items, group)](
                top, total, sums, out, lse, pieces, GROUP=group, D=dim, D2=dims,
                BM=min(t.merged, triton.next_power_of_2(pieces)), **how,
            )  # fmt: skip
    return Partial(out, lse), None, numbers
