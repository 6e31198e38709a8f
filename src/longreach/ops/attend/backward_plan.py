"""What attend's backward needs to know of a selection, found on the device without a sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.ops.attend.tiles import sorted_tiles
from longreach.ops.selection import Bound, Lists, Spans, slots_seen
from longreach.ops.types import KVView, RowRange, Rows

FAR = (1 << 30) - 1


class Limits(NamedTuple):
    """Slots [low, high) of each span, cut to those visible to the row: int32 [spans, R, axis]; empty ones are [0, 0).

    axis: 1, or one entry for each KV head, or for each query head.
    """

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class RowLists:
    """Lists as rows use them. index int [L, heads, C], count int [L, heads], log_weight float [L, heads, C] or None;
    number int32 [R, A]: list * heads + head of each row's units, which are the KV heads, or all query heads."""

    index: Tensor
    count: Tensor
    log_weight: Tensor | None
    number: Tensor

    def each(self, x: Tensor) -> Tensor:
        """What x [L, heads, ...] holds for each row and unit: [R, A, ...]."""
        return x.flatten(0, 1)[self.number.long()]


class Shape(NamedTuple):
    """Sequences, KV heads, and slots that a sequence can address."""

    sequences: int
    kv_heads: int
    slots: int


def limits_of(rows: Rows, kv: KVView, selection: Spans) -> Limits:
    """The spans of a selection. Slots must be positions."""
    seen, pos = slots_seen(rows, kv)[:, None], rows.pos.long()[:, None]

    def cut(bound: Bound) -> Tensor:
        value = (pos if bound.relative else torch.zeros_like(pos)) + bound.value
        return torch.minimum(value.clamp(min=0), seen)

    ends = [cut(bound) for span in selection.spans for bound in span] or [torch.zeros_like(pos)] * 2
    axis = max(x.shape[1] for x in ends)
    both = torch.stack([x.expand(-1, axis) for x in ends]).int()
    low, high = both[::2], both[1::2]
    return Limits(torch.where(low < high, low, 0).contiguous(), torch.where(low < high, high, 0).contiguous())


def row_lists(rows: Rows, kv: KVView, lists: Lists) -> RowLists:
    """The lists of a selection."""
    units = kv.heads if lists.per == "kv" else rows.q.shape[1]
    count, heads, device = rows.pos.shape[0], lists.index.shape[1], rows.pos.device
    of = torch.arange(count, device=device) if lists.row_to_list is None else lists.row_to_list.long()
    head = torch.arange(units, device=device) if heads > 1 else torch.zeros(units, dtype=torch.int64, device=device)
    if lists.head_map is not None:
        head = lists.head_map.long()
    number = (of[:, None] * heads + head).int()
    return RowLists(lists.index.contiguous(), lists.count.contiguous(), lists.log_weight, number)


def overflow_limits(lists: RowLists, seen: Tensor) -> Limits:
    """The dense spans of rows whose lists overflowed. seen: int [R], slots visible to each row."""
    over = lists.each(lists.count) > lists.index.shape[2]
    high = torch.where(over, seen[:, None], 0).int()[None]
    return Limits(torch.zeros_like(high), high)


def tiles_of_rows(
    seq: Tensor, pos: Tensor, shape: Shape, size: int, runs: tuple[RowRange, ...] | None = None
) -> Tensor:
    """Rows by sequence and position in tiles: int32 [tiles, size], -1 for none. No sort where runs tell their order."""
    of, widths = [run.seq for run in runs or ()], {run.rows for run in runs or ()}
    if len(widths) != 1 or of != sorted(set(of)):
        return sorted_tiles(seq, pos, min(shape.sequences, seq.shape[0]), size)
    (width,) = widths
    start = torch.arange(0, seq.shape[0], width, dtype=torch.int32, device=seq.device)
    row = torch.arange(-(-width // size) * size, dtype=torch.int32, device=seq.device)
    return torch.where(row < width, row + start[:, None], -1).view(-1, size)


def tile_ranges(tiles: Tensor, seq: Tensor, shape: Shape, limits: Limits, block: int) -> Tensor:
    """int32 [spans, B, blocks, 2]: the tiles [first, stop) outside which no row attends to a block of `block` keys.

    The range is exact where a sequence's rows start and end their spans in the order of their positions, as windows and
    causal spans do; else it may hold tiles without any of the block.
    """
    batch, blocks = shape.sequences, -(-shape.slots // block)
    row = tiles.clamp(min=0).long()
    some = (tiles >= 0)[None, :, :, None] & (limits.low < limits.high)[:, row]
    low = torch.where(some, limits.low[:, row], FAR).flatten(2).amin(2).long()  # [spans, tiles]
    high = torch.where(some, limits.high[:, row], 0).flatten(2).amax(2).long()
    of, spare, empty = seq.long()[row[:, 0]], batch * blocks, low >= high
    number = torch.arange(tiles.shape[0], device=tiles.device).expand_as(low)
    begins = torch.where(empty, spare, of * blocks + low // block)
    ends = torch.where(empty, spare, of * blocks + (high - 1).clamp(min=0) // block)
    first = number.new_full((low.shape[0], spare + 1), tiles.shape[0]).scatter_reduce(1, ends, number, "amin")
    stop = number.new_zeros(low.shape[0], spare + 1).scatter_reduce(1, begins, number + 1, "amax")
    # a tile that ends at a block or after it, and one that begins at it or before it
    first = first[:, :spare].unflatten(1, (batch, blocks)).flip(2).cummin(2).values.flip(2)
    stop = stop[:, :spare].unflatten(1, (batch, blocks)).cummax(2).values
    return torch.stack([first, stop], -1).int().contiguous()


def _used(lists: RowLists, seen: Tensor, block: int) -> Tensor:
    """bool [R, A, C]: entries in use that name a block of which the row sees some key."""
    index, used, room = lists.each(lists.index), lists.each(lists.count), lists.index.shape[2]
    there = (torch.arange(room, device=index.device) < used[..., None]) & (used <= room)[..., None]
    return there & (index >= 0) & (index.long() * block < seen[:, None, None])


def sorted_pairs(lists: RowLists, seq: Tensor, seen: Tensor, shape: Shape, block: int) -> tuple[Tensor, Tensor]:
    """Entries in use of all rows' lists, by sequence, KV head and block that they name, then by row.

    (int32 order of pairs (r A + a) C + c, int32 [B G blocks + 1], where each block's pairs start.)
    """
    units, blocks = lists.number.shape[1], -(-shape.slots // block)
    index, there = lists.each(lists.index).long(), _used(lists, seen, block)
    head = torch.arange(units, device=index.device) * shape.kv_heads // units
    key = (seq.long()[:, None, None] * shape.kv_heads + head[:, None]) * blocks + index
    most = shape.sequences * shape.kv_heads * blocks
    key = torch.where(there, key, most).flatten()
    key, order = (key.int() if most < 1 << 31 else key).sort(stable=True)
    first = torch.searchsorted(key, torch.arange(most + 1, device=key.device, dtype=key.dtype), out_int32=True)
    return order.int(), first
