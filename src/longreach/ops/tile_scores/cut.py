"""Tiles of more rows x query heads than a kernel's program holds, cut into pieces that it does hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        held = max(n for n in range(1, min(group, most) + 1) if group % n == 0)
        parts = group // held
        table, start = tiles.rows, tiles.start
        if parts > 1:
            number = table[:, :, None] * parts + torch.arange(parts, dtype=torch.int32, device=table.device)
            table = torch.where(table[:, :, None] < 0, -1, number).flatten(1)
            seq, pos = (x.repeat_interleave(parts) for x in (rows.seq, rows.pos))
            rows = Rows(_apart(rows.q, kv_heads, parts), seq, pos)
        size = min(table.shape[1], most // held)
        table = torch.nn.functional.pad(table, (0, -table.shape[1] % size), value=-1)
        pieces = table.shape[1] // size
        return cls(rows, RowTiles(table.reshape(-1, size), start.repeat_interleave(pieces)), kv_heads, parts, pieces)

    def apart(self, lse: Tensor) -> Tensor:
        """lse [R, H] of the rows as they were, for `rows`."""
        return _apart(lse[..., None], self.kv_heads, self.parts)[..., 0]

    def together(self, lse: Tensor) -> Tensor:
        """The other way."""
        split = lse.unflatten(1, (self.kv_heads, -1)).unflatten(0, (-1, self.parts))
        return split.transpose(1, 2).flatten(1)


def _apart(x: Tensor, kv_heads: int, parts: int) -> Tensor:
    """[R, H, D] -> [R * parts, H / parts, D]; a view for one KV head."""
    split = x.unflatten(1, (kv_heads, parts, -1)).transpose(1, 2)
    return split.reshape(-1, x.shape[1] // parts, x.shape[2])
