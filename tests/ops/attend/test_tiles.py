"""Tiles cover every row once, and never mix sequences or lists."""

from __future__ import annotations

import pytest
import torch

from longreach.ops import Lists, RowRange, Rows, Spans
from longreach.ops.attend.tiles import Tiles, tiles_of
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.selections import packed


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
        rows = Rows(torch.randn(sum(runs), 2, 8), seq, seq, tuple(RowRange(n, b) for b, n in enumerate(runs)))
    tiles = tiles_of(rows, kv, Spans.dense(), most=most)
    found = rows_in(tiles)
    assert len(found) == tiles.count and tiles.size <= most
    assert sorted(r for tile in found for r in tile) == list(range(rows.q.shape[0]))
    assert all(len(set(rows.seq[tile].tolist())) <= 1 for tile in found)


def test_rows_that_share_a_list_come_together_however_many_heads_and_sequences_there_are() -> None:
    """Prompts of 3 sequences in tiles of 8 rows, each with a list of its own, packed: tiles are as large."""
    kv = random_kv([64] * 3, heads=4, dim=8)
    seq, pos = torch.arange(3).repeat_interleave(64), torch.arange(64).repeat(3)
    rows = Rows(torch.randn(192, 8, 8), seq, pos)
    of = torch.arange(24).repeat_interleave(8)
    lists = Lists(torch.zeros(24, 4, 2).long(), torch.ones(24, 4).long(), row_to_list=of)
    for selection in (lists, packed(lists)):
        tiles = tiles_of(rows, kv, selection, most=32)
        assert tiles.size == 8
        assert sorted(filter(None, rows_in(tiles))) == [list(range(8 * n, 8 * n + 8)) for n in range(24)]


@pytest.mark.parametrize("most", [1, 3, 16])
def test_lists(most: int) -> None:
    kv = random_kv([20, 20], heads=1, dim=8)
    rows = random_rows(kv, 19)
    of = torch.randint(0, 3, (19,))
    shared = Lists(torch.zeros(3, 1, 4).long(), torch.ones(3, 1).long(), row_to_list=of)
    found = rows_in(tiles_of(rows, kv, shared, most=most))
    assert sorted(r for tile in found for r in tile) == list(range(19))
    assert all(len(set(zip(rows.seq[tile].tolist(), of[tile].tolist(), strict=True))) <= 1 for tile in found)
    own = Lists(torch.zeros(19, 1, 4).long(), torch.ones(19, 1).long())
    assert rows_in(tiles_of(rows, kv, own, most=most)) == [[r] for r in range(19)]
