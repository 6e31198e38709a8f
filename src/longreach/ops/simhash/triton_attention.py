"""attend_sampled on the GPU, in four kernels. Nothing waits for the device; all may be captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longreach.ops.simhash import triton_attention_kernels as kernels
from longreach.ops.simhash.attention import HEADS, NUMBERS, SPLITS, counters, look_up_bytes, part_of
from longreach.ops.simhash.probability import TINY, form
from longreach.ops.simhash.tables import HashTables
from longreach.ops.simhash.triton import refuse
from longreach.ops.types import KVView, Partial, Rows


@dataclass(frozen=True)
class Tuning:
    """bucket: ids read from a bucket at a time; part: positions of a program, a power of 2 (None: by `part_of`);
    scanned: positions of a round; keys: attended to at a time; splits: programs that attend where a list is too long;
    merged: parts merged at a time, at most; mark_warps, warps: of a program that looks up, and that attends.
    """

    bucket: int = 16
    part: int | None = None
    scanned: int = 1024
    keys: int = 16
    splits: int = SPLITS
    merged: int = 128
    mark_warps: int = 1
    warps: int = 2


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None, tune: Tuning | None = None,
) -> tuple[Partial, None, Tensor]:  # fmt: skip
    refuse(rows.q, kv.k, kv.v)
    t, device = tune or Tuning(), rows.q.device
    count, heads, dim = rows.q.shape
    group, columns = heads // kv.heads, tables.ids.shape[3]
    per = counters(tables.tables)
    width = triton.cdiv(group, per)
    part = t.part or part_of(count * kv.heads, columns)
    parts, segments = triton.cdiv(columns, part), triton.cdiv(columns, tables.size) - tables.first // tables.size
    pieces, dims = parts + t.splits, max(16, triton.next_power_of_2(dim))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, kv.heads, *shape, dtype=dtype, device=device)

    out, lse = torch.empty(count, heads, dim, device=device), torch.empty(count, heads, device=device)
    numbers = empty(len(NUMBERS), dtype=torch.int64)
    marks = torch.zeros(count * kv.heads * (width * columns + 1), dtype=torch.int32, device=device)
    looked_up = marks[-count * kv.heads :].view(count, kv.heads)
    if count:
        top, total, sums = empty(pieces, HEADS), empty(pieces, HEADS), empty(pieces, HEADS, dims)
        counts, scratch = empty(parts, HEADS + 2, dtype=torch.int32), empty(parts, part, dtype=torch.int32)
        q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
        seq, pos, where, table = rows.seq.contiguous(), rows.pos.contiguous(), slots.contiguous(), kv.block_table
        memory = (
            kv.k, kv.k.stride()[:3], kv.v, kv.v.stride()[:3], kv.seq_lens if table is None else table,
            0 if table is None else table.stride(0), kv.seq_lens,
        )  # fmt: skip
        f = form(tables.tables, least)
        law = tables.tables, least, tables.bits, f.split, f.scale, f.ratios, f.binomials
        shape = {"GROUP": group, "D": dim, "D2": dims}
        paged = {"PAGED": table is not None, "PAGE": kv.page, "SOFTCAP": float(softcap or 0.0)}
        items = count * kv.heads
        with torch.cuda.device_of(q):
            kernels.mark[(items, tables.tables, segments)](
                q, q.stride()[:2], projections.contiguous().view(torch.int16), tables.ids, tables.ids.stride()[:3],
                tables.offsets, tables.offsets.stride()[:4], where, seq, tables.stop, marks, looked_up, columns,
                kv.heads, tables.first, BITS=tables.bits, **shape, SIZE=tables.size, PER=per, WORDS=width, BN=t.bucket,
                num_warps=t.mark_warps,
            )  # fmt: skip
            kernels.attend_parts[(items, parts)](
                q, q.stride()[:2], *memory, centre, where, seq, pos, tables.stop, marks, scratch, top, total, sums,
                counts, columns, kv.heads, tables.first, sinks, least, max(floor, TINY), scale, parts, pieces,
                **shape, OWN=own, **paged, PER=per, WORDS=width, WORDS2=triton.next_power_of_2(width),
                LAW=law, PART=part, BN=min(t.scanned, part), BC=t.keys, num_warps=t.warps,
            )  # fmt: skip
            kernels.attend_rest[(items, t.splits)](
                q, q.stride()[:2], *memory, where, seq, pos, tables.stop, limit, counts, looked_up, numbers, top,
                total, sums, kv.heads, tables.first, sinks, scale, parts, look_up_bytes(group, tables),
                BP=triton.next_power_of_2(parts), OWN=own, **shape, **paged, SIZE=tables.size, SPLITS=t.splits,
                BC=t.keys,
            )  # fmt: skip
            kernels.merge_parts[(items, group)](
                top, total, sums, counts, limit, out, lse, kv.heads, parts, t.splits, **shape, OWN=own,
                BP=triton.next_power_of_2(parts), 
                BM=min(t.merged, triton.next_power_of_2(max(parts, t.splits))), num_warps=4,
            )  # fmt: skip
    return Partial(out, lse), None, numbers
