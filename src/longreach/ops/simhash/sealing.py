"""Keys of a cache that enter the tables, by an implementation's codes and build, on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longreach.ops.simhash.tables import HashTables
from longreach.ops.types import KVView

AT_ONCE = 1 << 12  # keys that are copied and hashed at a time
PROGRAMS = 1 << 11  # of Triton's kernel, at most
CODES = 1 << 26  # bytes of codes of Triton's kernels where whole segments enter, but at least of one segment

Codes = Callable[[Tensor, Tensor, Tensor], Tensor]
Build = Callable[[HashTables, Tensor, Tensor, Tensor], None]


def workspace_bytes(tables: int, bits: int, block: int) -> int:
    """Bytes that Triton's kernel allocates: places of buckets, and codes. tables: of all KV heads and sequences."""
    return min(tables, PROGRAMS) * ((4 << bits) + 2 * block)


def segments_at_once(tables: int, size: int, segments: int, most: int) -> int:
    """Segments whose codes are computed together. most: bytes of codes."""
    return max(1, min(segments, most // (2 * tables * size)))


def seal(
    codes: Codes, build: Build, kv: KVView, slots: Tensor, tables: HashTables, projections: Tensor, centre: Tensor,
    stop: Tensor, centred: int,
) -> Tensor:  # fmt: skip
    held = tables.stop[slots.long()]
    for b in (stop > held.clamp(min=tables.first)).nonzero()[:, 0].tolist():
        slot, at, end = int(slots[b]), max(int(held[b]), tables.first), int(stop[b])
        if at == tables.first and centred:
            centre[slot] = _mean(kv, b, at, at + centred)
        seq = slots[b : b + 1]
        while at < end:  # a segment's keys are sorted together
            last = min((at // tables.size + 1) * tables.size, end)
            pieces = [range(i, min(i + AT_ONCE, last)) for i in range(at, last, AT_ONCE)]
            found = [codes(_keys(kv, b, piece), projections, centre[slot]) for piece in pieces]
            joined = torch.cat([x.view(torch.int16) for x in found]).view(torch.uint16)  # cat has no uint16
            build(tables, joined[None], seq, seq.new_tensor([last - at]))
            at = last
    return held


def _mean(kv: KVView, b: int, begin: int, end: int) -> Tensor:
    """fp32 [G, D]: the mean of the finite keys, summed in fp64."""
    keys = _keys(kv, b, range(begin, end))
    finite = keys.isfinite().all(-1, keepdim=True)  # one that is not must not make all others void
    total = torch.where(finite, keys, 0).sum(0, dtype=torch.float64)
    return (total / finite.sum(0).clamp(min=1)).float()


def _keys(kv: KVView, b: int, positions: range) -> Tensor:
    """[positions, G, D]: keys of a sequence of the view."""
    slot = torch.arange(positions.start, positions.stop, device=kv.k.device)
    page, offset = kv.locate(torch.full_like(slot, b), slot)
    return kv.k[page, :, offset]
