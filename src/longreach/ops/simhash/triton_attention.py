"""attend_sampled on the GPU, in four kernels, codes included. Nothing waits for the device; all may be captured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops.checks import refuse_wide
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
    """room: words of counters, at most ROOM; buckets: looked up at a time, at most, by a key's
    words, a power of 2; pieces: of buckets,
    read at a time; each: ids of a piece, a power of 2; scanned: words of a round, at most `room`; in_turn: of a round
    that a thread counts, powers of 2; search_warps: of a program that looks up; vector: bytes of keys attended to at a
    time; splits: programs that attend to a part's keys (None: by `splits_of`); warps, registers: of a program that
    attends; merged: parts merged at a time, at most; chained: whether a kernel may start while the one before it runs,
    and then waits.
    """

    room: int = ROOM
    buckets: int = BUCKETS
    pieces: int = 256
    each: int = 8
    scanned: int = 2048
    in_turn: int = 8
    search_warps: int = 8
    vector: int = 16384
    splits: int | None = None
    warps: int = 4
    stages: int = 2
    registers: int = 128
    merged: int = 128
    chained: bool = not INTERPRETED

    def __post_init__(self) -> None:
        ids, threads = self.pieces * self.each, 32 * self.search_warps
        if ids < threads:  # Triton would give an id to several threads, which would all count it
            raise ValueError(
                f"pieces of {self.each} ids: expected at least {threads} ids for {self.search_warps} warps, got {ids}"
            )


def attend_sampled(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, limit: Tensor, *,
    least: int, own: bool, sinks: int, floor: float, scale: float, softcap: float | None, tune: Tuning | None = None,
) -> tuple[Partial, None, Tensor]:  # fmt: skip
    refuse(rows.q, kv.k, kv.v)
    refuse_wide("simhash", rows, kv)
    t, device = tune or Tuning(), rows.q.device
    norms = tables.inverse_norms
    if norms is None:
        raise InvalidInput("tables: expected inverse_norms as HashTables.empty makes and seal fills them, got None")
    count, heads, dim = rows.q.shape
    group, items = heads // kv.heads, count * kv.heads
    found, counts, part, parts = search(rows, kv, slots, tables, projections, least=least, tune=t)
    splits = t.splits or splits_of(items, parts)
    pieces, dims = parts * splits, max(16, triton.next_power_of_2(dim))
    keys = max(16, t.vector // (dims * kv.k.element_size()))
    registers = t.registers if kv.k.element_size() == 2 else 255  # without tensor cores a program needs more

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, kv.heads, *shape, dtype=dtype, device=device)

    out, lse = torch.empty(count, heads, dim, device=device), torch.empty(count, heads, device=device)
    numbers = empty(len(NUMBERS), dtype=torch.int64)
    if count:
        top, total, sums = empty(pieces, group), empty(pieces, group), empty(pieces, group, dims)
        q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
        how = {"CHAINED": t.chained} | ({"launch_pdl": True} if t.chained else {})
        seq, pos, where, table = rows.seq.contiguous(), rows.pos.contiguous(), slots.contiguous(), kv.block_table
        view = (
            kv.k, kv.k.stride()[:3], kv.v, kv.v.stride()[:3], kv.seq_lens if table is None else table,
            0 if table is None else table.stride(0), kv.seq_lens,
        )  # fmt: skip
        with torch.cuda.device_of(q):
            attend_parts[(items, pieces)](
                q, q.stride()[:2], *view, centre, norms, norms.stride()[:2], where, seq, pos, tables.stop, limit, found,
                counts, numbers, top, total, sums, kv.heads, tables.first, sinks, max(floor, TINY), scale, parts,
                look_up_bytes(group, tables), GROUP=group, OWN=own, D=dim, D2=dims, PAGED=table is not None,
                PAGE=kv.page, SIZE=tables.size, LAW=law(tables, least), SOFTCAP=float(softcap or 0.0), PART=part,
                SPLITS=splits, BP=triton.next_power_of_2(parts), BC=keys, H=max(8, triton.next_power_of_2(group)),
                STAGES=t.stages, num_warps=t.warps, maxnreg=registers, **how,
            )  # fmt: skip
            merge_parts[(items, group)](
                top, total, sums, out, lse, pieces, GROUP=group, D=dim, D2=dims,
                BM=min(t.merged, triton.next_power_of_2(pieces)), **how,
            )  # fmt: skip
    return Partial(out, lse), None, numbers


def search(
    rows: Rows, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, *, least: int,
    tune: Tuning | None = None,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """The sampled keys of each row and KV head, by parts of the context, codes included.

    Returns found int32 [R, G, parts, part], positions in the part and 2^16 times the heads as bits; counts int32 [R, G,
    parts, HEADS + 3]: keys of each head, of any head, heads over all keys, ids in the buckets; part and parts.
    """
    refuse(rows.q)
    t, device = tune or Tuning(), rows.q.device
    count, heads, _ = rows.q.shape
    group, columns = heads // kv.heads, tables.ids.shape[3]
    width = words(group, tables.tables)
    lanes = max(1, t.scanned // (t.in_turn * width))
    part = t.room // width
    items, parts = count * kv.heads, triton.cdiv(columns, part)
    buckets = min(t.buckets // width, triton.next_power_of_2(group * tables.tables))
    counts = torch.empty(count, kv.heads, parts, HEADS + 3, dtype=torch.int32, device=device)
    found = torch.empty(count, kv.heads, parts, part, dtype=torch.int32, device=device)
    if not count:
        return found, counts, part, parts
    memory = found
    if INTERPRETED:  # which has no shared memory
        memory = torch.from_numpy(np.empty(items * parts * (t.room + 3 * buckets + 2 * t.pieces), np.int32))
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    codes = triton_codes(q, projections, None, chained=t.chained)
    strides = tables.ids.stride()[:3]
    whole = all(n % t.each == 0 for n in (columns, tables.size, *strides)) and tables.ids.data_ptr() % 16 == 0
    with torch.cuda.device_of(q):
        search_parts[(items * parts,)](
            codes, tables.ids, strides, tables.offsets, tables.offsets.stride()[:4], slots.contiguous(),
            rows.seq.contiguous(), rows.pos.contiguous(), kv.seq_lens, tables.stop, memory, found, counts, kv.heads,
            tables.first, least, parts, GROUP=group, TABLES=tables.tables, SIZE=tables.size,
            PER=counters(tables.tables), WORDS=width, ROOM=t.room, WHOLE=whole, LOG=buckets.bit_length() - 1,
            BE=t.pieces, EACH=t.each, OF=t.scanned // (lanes * width), BN=lanes, num_warps=t.search_warps,
            CHAINED=t.chained, **({"launch_pdl": True} if t.chained else {}),
        )  # fmt: skip
    return found, counts, part, parts
