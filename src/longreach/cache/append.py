"""Places of the rows of one pass: their positions, and for each layer their slots, pages and offsets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from torch import Tensor

from longreach.ops.types import RowRange


@dataclass(frozen=True, eq=False)
class Placement:
    """Places of the rows of a pass in one layer. Layers that hold the same slots share one object.

    slot: int64 [R], the logical slot of each row's token. It orders tokens as their positions do, in every head, so
        it is the row's `Rows.pos` when it attends to this layer's view; slots differ from positions after eviction.
    page, offset: int64 [R], its place in memory. table: int64 [B, pages], the block table.
    seq_lens: int64 [B], slots in use after the pass; starts: before it, None if only on the device.
    runs: the rows by slot, on the host; None if only on the device.
    """

    slot: Tensor
    page: Tensor
    offset: Tensor
    seq_lens: Tensor
    table: Tensor
    starts: tuple[int, ...] | None = None
    runs: tuple[RowRange, ...] | None = None

    def take(self, index: Tensor, runs: tuple[RowRange, ...] | None = None) -> Placement:
        """The placement of the rows at `index` [r]. runs: those rows described on the host, or None."""
        slot, page, offset = (x[index] for x in (self.slot, self.page, self.offset))
        return Placement(slot, page, offset, self.seq_lens, self.table, self.starts, runs)


@dataclass(frozen=True, eq=False)
class Append:
    """The rows of one pass that write keys and values.

    slots: int64 [B], the cache slot of each sequence of the pass; seq: int64 [R], each row's index in `slots`;
    pos: int64 [R], absolute position; placements: one for all layers, or one for each layer.
    counts: rows of each sequence; added: new tokens of each, fewer where rows overwrite tokens; starts: tokens before
        the pass, None if only on the device; host_slots: `slots`. All on the host, and of the whole pass.
    number: identifies the pass within its cache. written: layer -> rows that were appended to it so far.
    """

    slots: Tensor
    seq: Tensor
    pos: Tensor
    placements: tuple[Placement, ...]
    counts: tuple[int, ...]
    added: tuple[int, ...]
    host_slots: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    number: int = -1
    written: Counter[int] = field(default_factory=Counter)

    def at(self, layer: int) -> Placement:
        """Places of the rows in `layer`; the same object for layers that hold the same slots."""
        return self.placements[layer if len(self.placements) > 1 else 0]

    def take(self, index: Tensor, runs: tuple[RowRange, ...] | None = None) -> Append:
        """The pass of the rows at `index` [r], for layers in which only these run. runs: as of a Placement."""
        shared = {id(p): p.take(index, runs) for p in self.placements}
        placements = tuple(shared[id(p)] for p in self.placements)
        return replace(self, seq=self.seq[index], pos=self.pos[index], placements=placements)
