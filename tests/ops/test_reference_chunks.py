"""Rows walked one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from longreach.ops import reference_chunks
from longreach.testing.inputs import random_kv, random_rows


@pytest.mark.parametrize("at_once", [1, 300, 1 << 20])
def test_each_row_is_in_one_step_of_its_sequence(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_chunks, "SCORES_AT_ONCE", at_once)
    kv = random_kv([20, 0, 9], heads=2, dim=8)
    rows = random_rows(kv, 25, seed=1)
    steps = reference_chunks.steps(rows, kv)
    assert torch.cat(steps).sort().values.tolist() == list(range(25))
    for step in steps:
        some = rows.take(step)
        assert len(set(some.seq.tolist())) == 1
        assert some.pos.tolist() == sorted(some.pos.tolist())
        assert len(step) == 1 or len(step) * int(kv.seq_lens[some.seq[0]]) * 4 <= at_once
    if at_once == 1:
        assert len(steps) == 25
    if at_once == 1 << 20:
        assert len(steps) == 3


def test_more_at_once_where_starting_kernels_costs() -> None:
    assert reference_chunks.at_once(torch.device("cpu")) == reference_chunks.IN_CACHE < reference_chunks.SCORES_AT_ONCE
    assert reference_chunks.at_once(torch.device("cuda")) == reference_chunks.SCORES_AT_ONCE


@pytest.mark.parametrize("page", [None, 1, 3, 64])
@pytest.mark.parametrize("slots", [[], [0], [4], [2, 3, 4, 5], [1, 4, 9, 12], list(range(13)), [3, 4, 5], [5, 6]])
@pytest.mark.parametrize("heads", [slice(None), slice(1, 2)])
def test_read_gives_the_slots_asked_for(page: int | None, slots: list[int], heads: slice) -> None:
    kv = random_kv([5, 13], heads=3, dim=8, page=page, memory="packed", dtype=torch.bfloat16)
    got = reference_chunks.read(kv.v, kv, torch.tensor(1), torch.tensor(slots, dtype=torch.int64), heads, torch.float32)
    assert got.dtype == torch.float32
    assert got.shape == (len(range(3)[heads]), len(slots), 8)
    for column, n in enumerate(slots):
        where = 1 if kv.block_table is None else int(kv.block_table[1, n // kv.page])
        assert torch.equal(got[:, column], kv.v[where, heads, n % kv.page].float())


def test_reach_ends_where_no_row_sees() -> None:
    kv = random_kv([20], heads=1, dim=8)
    rows = random_rows(kv, 3)
    for pos, want in (([3, 7, 1], 8), ([30, 2, 2], 20), ([-1, -1, -5], 0)):
        assert reference_chunks.reach(type(rows)(rows.q, rows.seq, torch.tensor(pos)), kv) == want
    evicted = random_kv([20], heads=1, dim=8, evicted=True)  # any slot may hold an early position
    assert reference_chunks.reach(type(rows)(rows.q, rows.seq, torch.tensor([3, 7, 1])), evicted) == 20
