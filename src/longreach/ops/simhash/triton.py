"""simhash on the GPU. Nothing waits for the device; all may be captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.checks import refuse_wide
from longreach.ops.selection import Per
from longreach.ops.simhash import triton_build_kernels as building
from longreach.ops.simhash import triton_kernels as kernels
from longreach.ops.simhash.api import Collisions
from longreach.ops.simhash.probability import TINY, form
from longreach.ops.simhash.sealing import CODES, PROGRAMS, segments_at_once
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import PLAIN_WIDEST, KVView, Rows

INTERPRETED: bool = kernels.INTERPRETED.value


@dataclass(frozen=True)
class Tuning:
    """How many at a time. few, many: vectors hashed by a program, where there are up to `few_vectors` and where there
    are more; bucket: ids read from a bucket; listed: positions of a list's round; weighed: keys of a program.
    Where keys enter tables: hashed, hashed_tables: keys and tables of a program that hashes; hashing: such programs for
    a block, at most; new: keys whose order is found, in a segment without keys; inserted: keys added to a segment with
    keys, at least 128; moved: ids that move; programs: that add a block, at most; registers: of one; codes: bytes of
    codes of segments, at most, but a segment's at least.
    chained: whether the kernels that seal may start while those before them run, and wait.
    """

    few: int = 16
    many: int = 64
    few_vectors: int = 256
    bucket: int = 64
    listed: int = 1024
    weighed: int = 64
    hashed: int = 64
    hashed_tables: int = 8
    hashing: int = 1024
    new: int = 64
    inserted: int = 256
    moved: int = 1024
    programs: int = PROGRAMS
    registers: int = 168
    codes: int = CODES
    chained: bool = not INTERPRETED


def codes(
    x: Tensor, projections: Tensor, centre: Tensor | None, *, chained: bool = False, tune: Tuning | None = None
) -> Tensor:
    """chained: the kernel may start while the one before it runs, and waits."""
    refuse(x, *(() if centre is None else (centre,)))
    tables, bits, dim = projections.shape
    out = x.new_empty((*x.shape[:-1], tables), dtype=torch.uint16)
    if not out.numel():
        return out
    t = tune or Tuning()
    vectors = _four(x)
    centres = vectors if centre is None else _four(centre.expand(x.shape))
    drawn = projections.contiguous().view(torch.int16)
    count = out.numel() // tables
    at_once = t.few if count <= t.few_vectors else t.many
    with torch.cuda.device_of(x):
        kernels.codes[(triton.cdiv(count, at_once), tables)](
            vectors, vectors.stride(), centres, centres.stride(), drawn, out, count, vectors.shape[2], vectors.shape[1],
            TABLES=tables, BITS=bits, BITS2=16, D=dim, D2=max(16, triton.next_power_of_2(dim)),
            CENTRED=centre is not None, BM=at_once, CHAINED=chained, **({"launch_pdl": True} if chained else {}),
        )  # fmt: skip
    return out


def _four(x: Tensor) -> Tensor:
    """[..., D] as [outer, middle, inner, D], a view if x has up to four dimensions."""
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.dim())]


def build(tables: HashTables, codes: Tensor, seq: Tensor, count: Tensor, *, tune: Tuning | None = None) -> None:
    refuse(tables.ids)
    if not codes.numel():
        return
    t, where = tune or Tuning(), seq.long()
    start = tables.stop[where].clamp(min=tables.first)
    stop = start + count.to(start.dtype)
    programs = len(seq) * tables.heads * tables.tables
    with torch.cuda.device_of(codes):
        building.build[(programs,)](
            *_memory(tables), codes, codes.stride(), where, start, stop, *_scratch(tables, programs, t, codes.device),
            tables.heads, tables.tables, tables.first, **_sizes(tables, t),
        )  # fmt: skip
    tables.stop.index_copy_(0, where, stop)


def seal(
    kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, stop: Tensor, *, centred: int,
    block: int, tune: Tuning | None = None,
) -> Tensor:  # fmt: skip
    """block: 0 for whole segments."""
    refuse(kv.k)
    if kv.k.shape[3] > PLAIN_WIDEST:
        raise Unsupported(
            f"simhash's Triton kernels take up to {PLAIN_WIDEST} channels a head, got {kv.k.shape[3]}; use "
            f"impl='reference', or another method than magicpig"
        )
    t, count, device = tune or Tuning(), len(slots), kv.k.device
    held, done = torch.empty(2, count, dtype=torch.int32, device=device)
    if not count:
        return held
    dim, bits, items = kv.k.shape[3], projections.shape[1], count * tables.heads * tables.tables
    room, programs, chained = block, min(t.programs, items), t.chained and block > 0
    if not block:
        segments = triton.cdiv(min(kv.capacity, tables.ids.shape[3]), tables.size)
        at_once = segments_at_once(items, tables.size, segments, t.codes)
        room, programs = at_once * tables.size, items * at_once
    codes = torch.empty(items, room, dtype=torch.uint16, device=device)
    slots, stop, table = slots.contiguous(), stop.contiguous(), kv.block_table
    keys = (
        kv.k, kv.k.stride()[:3], kv.seq_lens if table is None else table, 0 if table is None else table.stride(0)
    )  # fmt: skip
    drawn = projections.contiguous().view(torch.int16)
    memory = {"D": dim, "D2": max(16, triton.next_power_of_2(dim)), "PAGED": table is not None, "PAGE": kv.page}
    hashing = {
        **memory, "TABLES": tables.tables, "BITS": bits, "BITS2": 16, "SIZE": tables.size, "BV": t.hashed,
        "BN": t.weighed, "NORMS": tables.inverse_norms is not None,
    }  # fmt: skip
    inverse = centre if tables.inverse_norms is None else tables.inverse_norms
    norms = inverse, inverse.stride()[:2]
    early = {"CHAINED": chained, **({"launch_pdl": True} if chained else {})}
    with torch.cuda.device_of(kv.k):
        scratch, sizes = _scratch(tables, programs, t, device), _sizes(tables, t)
        if block:
            tiles = triton.cdiv(room, t.hashed)
            # fewer programs where there are many sequences: in most steps they have nothing to do
            each = max(t.hashed_tables, triton.cdiv(tables.tables, max(1, t.hashing // (count * tables.heads * tiles))))
            building.hash_keys[(count * tables.heads, tiles, triton.cdiv(tables.tables, each))](
                *keys, centre, *norms, drawn, slots, tables.stop, stop, held, done, codes, tables.heads, tables.first,
                centred, 0, room, **hashing, BT=each, BLOCK=True, **early,
            )  # fmt: skip
            building.seal[(programs,)](
                *_memory(tables), slots, tables.stop, stop, held, done, scratch[0], codes, scratch[1], count,
                tables.heads, tables.tables, tables.first, room, **sizes, BS=triton.next_power_of_2(count),
                maxnreg=t.registers, **early,
            )  # fmt: skip
            return held
        building.average[(count, kv.heads)](
            *keys, slots, tables.stop, stop, held, centre, tables.first, centred, **memory, BN=t.weighed
        )
        for segment in range(tables.first // tables.size, segments, at_once):
            some = min(at_once, segments - segment)
            tiles = triton.cdiv(some * tables.size, t.hashed)
            building.hash_keys[(count * tables.heads, tiles, triton.cdiv(tables.tables, t.hashed_tables))](
                *keys, centre, *norms, drawn, slots, tables.stop, stop, held, done, codes, tables.heads, tables.first,
                centred, segment, room, **hashing, BT=t.hashed_tables, BLOCK=False, CHAINED=False,
            )  # fmt: skip
            building.add_keys[(items, some)](
                *_memory(tables), slots, stop, held, codes, *scratch, tables.heads, tables.tables, tables.first,
                segment, room, **sizes,
            )  # fmt: skip
    tables.stop.index_copy_(0, slots.long(), torch.where(stop > held.clamp(min=tables.first), stop, held).int())
    return held


def _scratch(tables: HashTables, programs: int, tune: Tuning, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of buckets, and what the interpreter uses for words of shared memory."""
    words = 2 * triton.cdiv(tables.size, 32) + tune.inserted
    cursors = torch.empty(programs, 1 << tables.bits, dtype=torch.int32, device=device)
    return cursors, torch.from_numpy(np.empty((programs, words), np.int32)) if INTERPRETED else cursors


def _sizes(tables: HashTables, tune: Tuning) -> dict[str, int]:
    buckets = 1 << tables.bits
    return {
        "SIZE": tables.size, "BUCKETS": buckets, "BB": min(buckets, 1024), "BN": tune.moved, "BV": tune.new,
        "BK": tune.inserted,
    }  # fmt: skip


def collide(
    rows: Rows, tables: HashTables, codes: Tensor, *, capacity: int, least: int, per: Per, tune: Tuning | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse(tables.ids)
    t, (count, heads), device = tune or Tuning(), rows.q.shape[:2], codes.device
    lists = tables.heads if per == "kv" else heads
    index = torch.empty(count, lists, capacity, dtype=torch.int32, device=device)
    met = torch.empty(count, lists, capacity, dtype=torch.uint8, device=device)
    used, looked_up = torch.zeros(2, count, lists, dtype=torch.int32, device=device)
    if not count:
        return index, used, met, looked_up
    columns, seq = tables.ids.shape[3], rows.seq.contiguous()
    times = torch.zeros(count, heads, columns, dtype=torch.int32, device=device)
    width = heads // lists
    with torch.cuda.device_of(codes):
        kernels.look_up[(count * heads, tables.tables)](
            *_memory(tables), codes.contiguous(), seq, tables.stop, times, looked_up, columns, heads, tables.heads,
            tables.tables, tables.first, WIDTH=width, SIZE=tables.size, BN=t.bucket, num_warps=1,
        )  # fmt: skip
        kernels.gather[(count * lists,)](
            times, seq, tables.stop, index, used, met, columns, capacity, tables.first, lists, least, WIDTH=width,
            BN=t.listed,
        )  # fmt: skip
    return index, used, met, looked_up


def weigh(
    rows: Rows, kv: KVView, tables: HashTables, found: Collisions, centre: Tensor, *, floor: float,
    tune: Tuning | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse(rows.q, kv.k, centre)
    refuse_wide("simhash", rows, kv)
    count, heads, dim = rows.q.shape
    per_kv = 1 if found.per == "kv" else kv.group(rows)
    lists, room = kv.heads * per_kv, found.index.shape[2]
    weight, factor = torch.empty(2, *found.index.shape, dtype=torch.float32, device=kv.k.device)
    if not weight.numel():
        return weight, factor
    t, table = tune or Tuning(), kv.block_table
    q = rows.q if rows.q.stride(2) == 1 else rows.q.contiguous()
    with torch.cuda.device_of(kv.k):
        kernels.weigh[(count * lists, triton.cdiv(room, t.weighed))](
            q, q.stride()[:2], kv.k, kv.k.stride()[:3], centre.float().contiguous(), rows.seq.contiguous(),
            kv.seq_lens if table is None else table, 0 if table is None else table.stride(0),
            found.index.contiguous(), found.met.contiguous(), found.count.contiguous(), weight, factor, room, lists,
            max(floor, TINY), WIDTH=heads // lists, PER_KV=per_kv, D=dim, D2=triton.next_power_of_2(dim),
            PAGED=table is not None, PAGE=kv.page, LAW=law(tables, found.least), BC=t.weighed,
        )  # fmt: skip
    return weight, factor


def law(tables: HashTables, least: int) -> tuple[Any, ...]:
    """The constants of u as kernels take them: tables, least, bits, split, scale, coefficients, binomials."""
    f = form(tables.tables, least)
    return tables.tables, least, tables.bits, f.split, f.scale, f.coefficients[: f.single], f.binomials


def _memory(tables: HashTables) -> tuple[Any, ...]:
    return tables.ids, tables.ids.stride()[:3], tables.offsets, tables.offsets.stride()[:4]


def refuse(*tensors: Tensor) -> None:
    """Raise Unsupported for what these kernels cannot do and the reference can."""
    if any(x.dtype == torch.float64 for x in tensors):
        raise Unsupported("simhash's Triton kernels compute in fp32; for fp64 use impl='reference'")
    if tensors[0].device.type != "cuda" and not INTERPRETED:
        raise Unsupported(
            f"simhash's Triton kernels run on CUDA devices, got {tensors[0].device}; use impl='reference' "
            f"(or set TRITON_INTERPRET=1 before longreach is used, to debug them)"
        )
    if INTERPRETED and any(x.dtype == torch.bfloat16 for x in tensors):
        raise Unsupported("simhash under TRITON_INTERPRET=1: the interpreter gets bf16 wrong; use fp16 or fp32")
