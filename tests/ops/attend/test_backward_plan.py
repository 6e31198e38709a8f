"""What the backward of attend's kernels takes of a selection, against the selection's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.ops import Rows, Span, Spans, absolute, relative
from longreach.ops.attend import backward_plan as plans
from longreach.ops.selection import slots_seen
from longreach.ops.types import RowRange
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.selections import random_lists, random_spans


@pytest.mark.parametrize("per", ["kv", "query"])
def test_limits_are_the_mask(per: Any) -> None:
    for seed in range(5):
        kv = random_kv([20, 0, 9], seed=seed)
        rows = random_rows(kv, 7, seed=seed)
        spans = random_spans(rows, kv, per=per, seed=seed)
        low, high = plans.limits_of(rows, kv, spans)
        slot = torch.arange(kv.capacity)
        mask = ((slot >= low[..., None]) & (slot < high[..., None])).any(0)
        assert torch.equal(mask.expand_as(spans.mask(rows, kv)), spans.mask(rows, kv).expand_as(mask))
        assert bool(((low < high) | ((low == 0) & (high == 0))).all())


def test_ranges_hold_every_tile_that_sees_a_block_and_for_windows_no_other() -> None:
    seq = torch.arange(2).repeat_interleave(torch.tensor([50, 31]))
    pos = torch.cat([torch.arange(50), torch.arange(31)])
    order = torch.randperm(81, generator=torch.Generator().manual_seed(0))
    kv = random_kv([50, 31], heads=1, dim=8)
    rows = Rows(torch.randn(81, 1, 8), seq[order], pos[order])
    shape = plans.Shape(2, 1, kv.capacity)
    tiles = plans.tiles_of_rows(rows.seq, rows.pos, shape, 4)
    assert sorted(tiles[tiles >= 0].tolist()) == list(range(81))
    odd = absolute(torch.randint(0, 40, (81, 1), generator=torch.Generator().manual_seed(1)))
    for spans, exact in (
        (Spans.dense(), True),
        (Spans.window(9), True),
        (Spans((Span(absolute(0), absolute(3)), Span(relative(-5), relative(1)))), True),
        (Spans((Span(odd, relative(1)),)), False),
    ):
        limits = plans.limits_of(rows, kv, spans)
        ranges = plans.tile_ranges(tiles, rows.seq, shape, limits, 8)
        for s in range(len(spans.spans)):
            for b in range(2):
                for block in range(ranges.shape[2]):
                    sees = (limits.low[s, :, 0] < block * 8 + 8) & (limits.high[s, :, 0] > block * 8) & (rows.seq == b)
                    want = [n for n, tile in enumerate(tiles) if any(r >= 0 and bool(sees[r]) for r in tile)]
                    found = list(range(*ranges[s, b, block].tolist()))
                    assert found == want if exact else set(found) >= set(want)


@pytest.mark.parametrize("lengths", [[9], [9, 9], [8, 8, 8]])
def test_tiles_of_runs_are_those_of_the_sort(lengths: list[int]) -> None:
    seq = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    pos = torch.cat([torch.arange(n) for n in lengths])
    shape = plans.Shape(len(lengths), 1, 16)
    runs = tuple(RowRange(n, b, 0) for b, n in enumerate(lengths))
    got, want = (plans.tiles_of_rows(seq, pos, shape, 4, given) for given in (runs, None))
    assert torch.equal(got, want[(want >= 0).any(1)])


def test_runs_out_of_order_or_of_several_widths_are_sorted() -> None:
    shape = plans.Shape(2, 1, 16)
    for runs in ((RowRange(3, 1, 0), RowRange(3, 0, 0)), (RowRange(2, 0, 0), RowRange(4, 1, 0))):
        seq = torch.cat([torch.full((run.rows,), run.seq) for run in runs])
        pos = torch.cat([torch.arange(run.rows) for run in runs])
        assert torch.equal(plans.tiles_of_rows(seq, pos, shape, 4, runs), plans.tiles_of_rows(seq, pos, shape, 4))


@pytest.mark.parametrize("per", ["kv", "query"])
def test_sorted_pairs_hold_the_entries(per: Any) -> None:
    kv = random_kv([40, 23], heads=2, seed=1)
    rows = random_rows(kv, 9, seed=1)
    made = random_lists(rows, kv, per=per, block=4, overflow=0.2, seed=1)
    lists, seen = plans.row_lists(rows, kv, made), slots_seen(rows, kv)
    units, room = lists.number.shape[1], made.index.shape[2]
    entries = {
        (r, a, int(made.index[r, a, c]))
        for r in range(9)
        for a in range(units)
        for c in range(int(made.count[r, a]) if int(made.count[r, a]) <= room else 0)
        if int(made.index[r, a, c]) * 4 < int(seen[r])
    }
    shape = plans.Shape(2, 2, kv.capacity)
    order, first = plans.sorted_pairs(lists, rows.seq, seen, shape, 4)
    blocks = -(-kv.capacity // 4)
    for key in range(2 * 2 * blocks):
        b, g, block = key // (2 * blocks), key // blocks % 2, key % blocks
        pairs = order[first[key] : first[key + 1]].tolist()
        assert pairs == sorted(pairs)
        want = {(r, a, n) for r, a, n in entries if (int(rows.seq[r]), a * 2 // units, n) == (b, g, block)}
        assert {(p // (units * room), p // room % units, block) for p in pairs} == want and len(pairs) == len(want)
