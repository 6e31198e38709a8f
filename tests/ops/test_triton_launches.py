"""Launches are observed as they are made, and no longer than asked for."""

from __future__ import annotations

import pytest
import torch

from longreach.ops import KVView, Rows, Spans, attend
from longreach.ops.append import append
from longreach.ops.triton_launches import Observed, observe_launches

LENGTH = 20


def call(impl: str = "triton") -> None:
    k = torch.randn(1, 2, LENGTH, 16)
    rows = Rows(torch.randn(1, 4, 16), torch.tensor([0]), torch.tensor([LENGTH - 1]))
    attend(rows, KVView(k, k, torch.tensor([LENGTH])), Spans.dense(), scale=0.25, impl=impl)


def test_every_launch_is_noted_with_what_it_was_given() -> None:
    seen: list[Observed] = []
    with observe_launches(seen.append):
        call()
    assert [one.function.__name__ for one in seen] == ["attend_pieces", "merge_pieces"]
    pieces, merge = seen
    assert pieces.constants["D"] == 16 and pieces.constants["CAPPED"] is False and "scale" not in pieces.constants
    assert pieces.constants["layout"] == (1, 1, False) and pieces.warps == 1 and pieces.options == {}
    assert len(merge.grid) == 2 and merge.grid[0] == 4 and not merge.captured


def test_a_grid_that_is_a_number_or_a_function_is_noted_as_sizes() -> None:
    keys, row = torch.zeros(1, 2, 8, 16), torch.ones(3, 2, 16)
    place = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    seen: list[Observed] = []
    with observe_launches(seen.append):
        append(keys, keys.clone(), row, row, *place, impl="triton")
    assert [one.grid for one in seen] == [(3,)] and bool((keys[0, :, :3] == 1).all())


def test_nothing_is_noted_outside_the_block_or_after_an_error() -> None:
    seen: list[Observed] = []
    with pytest.raises(RuntimeError, match="stop"), observe_launches(seen.append):
        raise RuntimeError("stop")
    call()
    with observe_launches(seen.append):
        call("reference")
    assert seen == []


def test_observers_within_one_another_all_see_a_launch() -> None:
    outer: list[Observed] = []
    inner: list[Observed] = []
    with observe_launches(outer.append):
        with observe_launches(inner.append):
            call()
        call()
    assert (len(inner), len(outer)) == (2, 4)
