"""Tiles cover every row once, and never mix sequences or lists."""

from __future__ import annotations

import pytest
import torch

from longreach.ops import Lists, Rows, Run, Spans
from longreach.ops.attend.tiles import Tiles, tiles_of
from longreach.testing.inputs import random_kv, random_rows


def rows_in(tiles: Tiles) -> list[list[int]]:
    """The rows of each tile, as the kernel numbers them."""
    if tiles.table is not None:
        return [[r for r in row if r >= 0] for row in tiles.table.tolist()]
    a_run = -(-tiles.width // tiles.size)
    found = []
    for tile in range(tiles.count):
        start = tile % a_run * tiles.size
        found.append([tile // a_run * tiles.width + n for n in range(start, min(start + tiles.size, tiles.width))])
    return found


@pytest.mark.parametrize("most", [1, 4, 32])
@pytest.mark.parametrize("runs", [(5, 5), (3, 9, 0, 1), (1, 1, 1), None])
def test_spans(most: int, runs: tuple[int, ...] | None) -> None:
    kv = random_kv([20, 20, 20, 20], heads=1, dim=8)
    if runs is None:
        rows = random_rows(kv, 23)
    else:
        seq = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
        rows = Rows(torch.randn(sum(runs), 2, 8), seq, seq, tuple(Run(n, b) for b, n in enumerate(runs)))
    tiles = tiles_of(rows, kv, Spans.dense(), most=most)
    found = rows_in(tiles)
    assert len(found) == tiles.count and tiles.size <= most
    assert sorted(r for tile in found for r in tile) == list(range(rows.q.shape[0]))
    assert all(len(set(rows.seq[tile].tolist())) <= 1 for tile in found)


@pytest.mark.parametrize("most", [1, 3, 16])
def test_lists(most: int) -> None:
    kv = random_kv([20, 20], heads=1, dim=8)
    rows = random_rows(kv, 19)
    of = torch.randint(0, 3, (19,))
    shared = Lists(torch.zeros(3, 1, 4).long(), torch.ones(3, 1).long(), list_of=of)
    found = rows_in(tiles_of(rows, kv, shared, most=most))
    assert sorted(r for tile in found for r in tile) == list(range(19))
    assert all(len(set(zip(rows.seq[tile].tolist(), of[tile].tolist(), strict=True))) <= 1 for tile in found)
    own = Lists(torch.zeros(19, 1, 4).long(), torch.ones(19, 1).long())
    assert rows_in(tiles_of(rows, kv, own, most=most)) == [[r] for r in range(19)]
