"""Tiles of prompt rows, and the selection of a tile: a list of keys before it, and its own keys (Kascade's prefill)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longreach.errors import SelectionError
from longreach.ops.selection import Lists, PackedLists, Per, Selection, Span, Spans, absolute, relative
from longreach.ops.types import INTS, KVView, Rows, describe, require

FIRST, LAST = 64, 128  # slots of the beginning, and before a tile, that an estimate of log-sums reads in full


@dataclass(frozen=True)
class RowTiles:
    """Rows of a pass in tiles, each of one sequence.

    rows: int32 [L, T], the numbers of each tile's rows, -1 in places without a row. A tile may have fewer rows than
        others, and some of a tile's places may be empty at its beginning or its end.
    start: int [L], the tile's first slot: keys before it are chosen, keys from it on are the tile's own.
    """

    rows: Tensor
    start: Tensor

    def take(self, index: slice | Tensor) -> RowTiles:
        """Some of the tiles, by a slice or by int [l]."""
        return RowTiles(self.rows[index], self.start[index])

    def check(self, rows: Rows) -> None:
        """Raise InvalidInput where shapes, dtypes or devices do not fit the rows; on a CPU also for row numbers."""
        table, start = self.rows, self.start
        ok = isinstance(table, Tensor) and table.dtype == torch.int32 and table.dim() == 2 and table.shape[1] >= 1
        require(ok, lambda: f"tiles: expected row numbers, int32 [L, T], got {describe(table)}")
        ok = isinstance(start, Tensor) and start.dtype in INTS and start.shape == table.shape[:1]
        require(ok, lambda: f"tiles: expected a start for each tile, int [{table.shape[0]}], got {describe(start)}")
        for name, x in (("rows", table), ("start", start)):
            on = x.device == rows.pos.device
            require(on, lambda: f"tiles.{name}: expected on {rows.pos.device} like the rows, got {describe(x)}")
        if table.device.type != "cpu" or not table.numel():
            return  # values lie on the device: reading them would cost a sync
        count, there = rows.pos.shape[0], table >= 0
        low, high = int(table.min()), int(table.max())
        require(low >= -1 and high < count, lambda: f"tiles: expected rows below {count}, got {low} to {high}")
        if not count:
            return
        seq = rows.seq[table.clamp(min=0).long()].long()
        least = seq.masked_fill(~there, torch.iinfo(torch.int64).max).amin(1)
        most = seq.masked_fill(~there, -1).amax(1)
        mixed = (least < most).nonzero()[:, 0].tolist()
        require(not mixed, lambda: f"tiles: expected rows of one sequence in each, got several in tile {mixed[0]}")


@dataclass(frozen=True)
class TileLists(Selection):
    """Each row attends to its tile's list and to the tile's own keys, [start, pos].

    lists: keys before the tile, one list a tile and entry of the head axis, with `row_to_list` and `all_visible`;
        without blocks and log-weights. own: the span of the tile's own keys, of each row. tiles: the tiles, list after
        list, which together hold every row once; None after `take`, as implementations by tile take whole passes.
    """

    lists: PackedLists | Lists
    own: Spans
    tiles: RowTiles | None
    per: Per = field(default="kv", init=False)

    @classmethod
    def of(cls, lists: PackedLists, tiles: RowTiles) -> TileLists:
        """The selection of these lists and tiles, one list a tile."""
        assert lists.row_to_list is not None, lists
        return cls(lists, own_keys(tiles, lists.row_to_list), tiles)

    @property
    def entries(self) -> Tensor:
        """int: the entries of all lists."""
        return self.lists.index

    def check(self, rows: Rows, kv: KVView, *, entries: bool = True) -> None:
        lists, tiles = self.lists, self.tiles
        ok = isinstance(lists, (PackedLists, Lists)) and lists.per == "kv" and lists.block == 1 and lists.all_visible
        ok = ok and lists.log_weight is None and (tiles is None or lists.row_to_list is not None)
        require(
            ok,
            lambda: (
                f"lists: expected lists of keys per KV head with row_to_list and all_visible=True, without blocks and "
                f"log-weights, got {describe(lists)}"
            ),
        )
        lists.check(rows, kv, entries=entries)
        self.own.check(rows, kv, entries=entries)
        if tiles is None:
            return
        tiles.check(rows)
        count = (lists.offsets.shape[0] - 1) // lists.heads if isinstance(lists, PackedLists) else lists.index.shape[0]
        require(
            tiles.rows.shape[0] == count,
            lambda: f"tiles: expected as many as lists, {count}, got {tiles.rows.shape[0]}",
        )
        if tiles.rows.device.type == "cpu":
            self._check_tiles(rows, tiles)
            if entries:
                self.check_entries(rows, kv)

    def _check_tiles(self, rows: Rows, tiles: RowTiles) -> None:
        tile, place = (tiles.rows >= 0).nonzero(as_tuple=True)
        number = tiles.rows[tile, place].long()
        once = torch.bincount(number, minlength=rows.pos.shape[0])
        bad = (once != 1).nonzero()[:, 0].tolist()
        require(not bad, lambda: f"tiles: expected every row once, got row {bad[0]} {int(once[bad[0]])} times")
        assert self.lists.row_to_list is not None
        other = (self.lists.row_to_list[number].long() != tile).nonzero()[:, 0].tolist()
        require(not other, lambda: f"row_to_list: expected the tile of each row, got another for row {other[0]}")

    def check_entries(self, rows: Rows, kv: KVView) -> None:
        """Raise SelectionError for lists as `Lists.check_entries` does, and for entries that are a tile's own keys."""
        self.lists.check_entries(rows, kv)
        padded = self.padded().lists
        assert isinstance(padded, Lists)
        if self.tiles is None or not padded.index.numel():
            return
        used = torch.arange(padded.index.shape[2], device=padded.index.device) < padded.count[..., None]
        late = used & (padded.index >= self.tiles.start[:, None, None])
        if bool(late.any()):
            tile, head, at = late.nonzero()[0].tolist()
            raise SelectionError(
                f"lists: expected keys before the tile, which begins at slot {int(self.tiles.start[tile])}, got "
                f"{int(padded.index[tile, head, at])} in tile {tile}; the tile's own keys are attended to anyway"
            )

    def padded(self) -> TileLists:
        """The same with lists of a common capacity (host work)."""
        return replace(self, lists=self.lists.padded()) if isinstance(self.lists, PackedLists) else self

    def take(self, index: Tensor) -> TileLists:
        """The selection of the rows at `index` [r], without tiles."""
        return replace(self, lists=self.lists.take(index), own=self.own.take(index), tiles=None)

    def chosen(self, rows: Rows, kv: KVView, stop: int) -> tuple[Tensor, Tensor | None]:
        return self.lists.chosen(rows, kv, stop)[0] | self.own.chosen(rows, kv, stop)[0], None

    def keys_read(self, rows: Rows, kv: KVView) -> Tensor:
        return self.lists.keys_read(rows, kv) + self.own.keys_read(rows, kv)  # disjoint: lists end before a tile begins


def own_keys(tiles: RowTiles, of: Tensor) -> Spans:
    """The keys of each row's own tile, from its start to the row. of: int [R], the tile of each row."""
    return Spans((Span(absolute(tiles.start[of.long()][:, None]), relative(1)),))


def with_lists(selection: TileLists, head_map: Tensor | None) -> TileLists:
    """The selection of a layer whose KV heads take the lists of the heads in `head_map`, int [G]; None: their own."""
    return selection if head_map is None else replace(selection, lists=replace(selection.lists, head_map=head_map))
