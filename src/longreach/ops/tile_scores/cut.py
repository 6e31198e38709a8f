"""Tiles of more rows x query heads than a kernel's program holds, cut into pieces that it does hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.ops.head_parts import apart, part_of, together
from longreach.ops.tile_lists import RowTiles
from longreach.ops.types import Rows


@dataclass(frozen=True)
class Cut:
    """The same scores as sums over pieces.

    rows: each row `parts` times, each time with other query heads of every KV head. tiles: `pieces` for each tile,
    one after another.
    """

    rows: Rows
    tiles: RowTiles
    kv_heads: int
    parts: int
    pieces: int

    @classmethod
    def of(cls, rows: Rows, kv_heads: int, tiles: RowTiles, most: int) -> Cut:
        """Pieces of at most `most` rows x query heads of a KV head."""
        group = rows.q.shape[1] // kv_heads
        held = part_of(group, most)
        parts = group // held
        table, start = tiles.rows, tiles.start
        if parts > 1:
            number = table[:, :, None] * parts + torch.arange(parts, dtype=torch.int32, device=table.device)
            table = torch.where(table[:, :, None] < 0, -1, number).flatten(1)
            seq, pos = (x.repeat_interleave(parts) for x in (rows.seq, rows.pos))
            rows = Rows(apart(rows.q, kv_heads, parts), seq, pos)
        size = min(table.shape[1], most // held)
        table = torch.nn.functional.pad(table, (0, -table.shape[1] % size), value=-1)
        pieces = table.shape[1] // size
        return cls(rows, RowTiles(table.reshape(-1, size), start.repeat_interleave(pieces)), kv_heads, parts, pieces)

    def apart(self, lse: Tensor) -> Tensor:
        """lse [R, H] of the rows as they were, for `rows`."""
        return apart(lse, self.kv_heads, self.parts)

    def together(self, lse: Tensor) -> Tensor:
        """The other way."""
        return together(lse, self.kv_heads, self.parts)
