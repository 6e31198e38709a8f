"""simhash on a CPU, compiled by Numba."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from longreach.errors import SelectionError
from longreach.ops.numba_inputs import NO_TABLE, floats, integers
from longreach.ops.numba_math import flat, in_threads, in_turns
from longreach.ops.selection import Per
from longreach.ops.simhash import numba_kernels as kernels
from longreach.ops.simhash import sealing
from longreach.ops.simhash.api import Collisions
from longreach.ops.simhash.probability import TINY, form
from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import KVView, Rows, accumulator

FEW = 256  # vectors that are multiplied by the directions as they are: others by their copy in fp32, in one product
VECTORS = 1024  # hashed at a time: their projections stay in a cache


def codes(x: Tensor, projections: Tensor, centre: Tensor | None) -> Tensor:
    wide = accumulator(x.dtype)
    tables, bits, dim = projections.shape
    out = torch.empty(*x.shape[:-1], tables, dtype=torch.uint16)
    codes = out.view(-1, tables)
    if 0 < len(codes) <= FEW and centre is None and wide == torch.float32:
        memory = (flat(x.contiguous()), flat(projections), projections.stride()[:2])
        in_threads(_workers(), kernels.encode, *memory, bits, codes.numpy())
        return out
    directions = projections.to(wide).view(-1, dim).T
    vectors = (x.to(wide) if centre is None else x.to(wide) - centre.to(wide)).reshape(-1, dim)
    for begin in range(0, len(vectors), VECTORS):
        some = vectors[begin : begin + VECTORS]
        square = some.float().square().sum(-1)
        void = ~((square > 0) & (square < torch.inf))
        signs = (some @ directions).numpy()
        in_threads(_workers(), kernels.pack, signs, void.numpy(), bits, codes[begin : begin + VECTORS].numpy())
    return out


def build(tables: HashTables, codes: Tensor, seq: Tensor, count: Tensor) -> None:
    where = seq.long()
    start = tables.stop[where].clamp(min=tables.first).long()
    stop = start + count.long()
    by_table = codes.view(torch.int16).permute(0, 2, 3, 1).contiguous().view(torch.uint16).numpy()
    in_threads(
        _workers(), kernels.build, *_memory(tables), by_table, where.contiguous().numpy(), start.numpy(), stop.numpy(),
        tables.first,
    )  # fmt: skip
    tables.stop[where] = stop.int()


def seal(
    kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor, stop: Tensor, *, centred: int,
    block: int | None,
) -> Tensor:  # fmt: skip
    return sealing.seal(codes, build, kv, slots, tables, projections, centre, stop, centred)


def collide(
    rows: Rows, tables: HashTables, codes: Tensor, *, capacity: int, least: int, per: Per
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, heads = rows.q.shape[:2]
    lists = tables.heads if per == "kv" else heads
    workers, segments = _workers(), -(-tables.ids.shape[3] // tables.size)
    parts = segments if count * lists < workers else 1  # few lists are looked up by segment, and joined
    room = min(capacity, tables.size) if parts > 1 else capacity
    index = torch.empty(count, lists, parts, room, dtype=torch.int32)
    met = torch.empty(count, lists, parts, room, dtype=torch.uint8)
    used, looked_up = (torch.empty(count, lists, parts, dtype=torch.int32) for _ in range(2))
    seq = integers(rows.seq)
    in_turns(
        workers, kernels.collide, *_memory(tables), codes.contiguous().numpy(), seq, integers(tables.stop)[seq],
        (tables.heads, heads // tables.heads, segments, tables.first), least,
        (index.numpy(), met.numpy(), used.numpy(), looked_up.numpy()),
    )  # fmt: skip
    if parts == 1:
        return index[:, :, 0], used[:, :, 0], met[:, :, 0], looked_up[:, :, 0]
    joined = torch.empty(count, lists, capacity, dtype=torch.int32)
    times = torch.empty(count, lists, capacity, dtype=torch.uint8)
    kernels.join(index.numpy(), met.numpy(), used.numpy(), joined.numpy(), times.numpy())
    return joined, used.sum(2, dtype=torch.int32), times, looked_up.sum(2, dtype=torch.int32)


def weigh(
    rows: Rows, kv: KVView, tables: HashTables, found: Collisions, centre: Tensor, *, floor: float
) -> tuple[Tensor, Tensor]:
    heads = rows.q.shape[1]
    group = kv.group(rows)
    width = group if found.per == "kv" else 1
    lists = heads // width
    table = NO_TABLE if kv.block_table is None else integers(kv.block_table)
    q, k = (x.float() if x.dtype == torch.float64 else x for x in (rows.q, kv.k))
    memory = (flat(k), k.stride()[:3], table, kv.block_table is not None, kv.page, floats(centre))
    weight, factor = torch.empty(found.index.shape), torch.empty(found.index.shape)
    seq = integers(rows.seq)
    wrong = np.full(_workers(), -1)
    in_turns(
        len(wrong), kernels.weigh, flat(q.contiguous()), memory,
        seq, integers(kv.seq_lens), (lists, heads // (kv.heads * width), width),
        (found.index.contiguous().numpy(), found.met.contiguous().numpy(), found.count.contiguous().numpy()),
        law(tables.bits, tables.tables, found.least, floor), weight.numpy(), factor.numpy(), wrong,
    )  # fmt: skip
    if (wrong >= 0).any():
        row = int(wrong.max())
        raise SelectionError(
            f"found: expected entries below {int(kv.seq_lens[seq[row]])}, the slots in use of sequence {seq[row]} "
            f"(row {row}), got others; were the keys found in tables of another cache?"
        )
    return weight, factor


@cache
def law(bits: int, tables: int, least: int, floor: float) -> tuple[object, ...]:
    """The constants of u, as the kernels take them."""
    f = form(tables, least)
    return (
        bits, tables, least, np.float32(f.split), np.float32(f.scale), np.array(f.coefficients[: f.single], np.float32),
        np.array(f.binomials, np.float32), np.float32(max(floor, TINY)),
    )  # fmt: skip


def _memory(tables: HashTables) -> tuple[object, ...]:
    return (
        flat(tables.ids), tables.ids.stride()[:3], flat(tables.offsets), tables.offsets.stride()[:4],
        (tables.size, 1 << tables.bits),
    )  # fmt: skip


def _workers() -> int:
    return torch.get_num_threads()
