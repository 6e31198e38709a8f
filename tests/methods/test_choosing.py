"""What methods share: the best entries in ascending order, layer numbers, the longest list of a budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.base import budget
from longreach.methods.choosing import check_layers, check_layers_of, keys_for_budget, max_keys, placed
from longreach.methods.dense import Dense
from longreach.ops import HeadShard
from tests.methods.one_layer import Layers, highest


@pytest.mark.parametrize("last", [0, 1])
def test_the_best_keys_of_each_row(last: int) -> None:
    """Ragged rows, a budget that is another count for each, NaN past the context."""
    layers = Layers(Dense(), slots=2)
    layers.read([0, 1], [44, 9])
    ((call, _),) = layers.decode([1, 0])
    scores = torch.randn(2, 3, call.kv.capacity)
    scores[0, :, 10:], scores[1, :, 45:] = torch.nan, torch.nan
    found = keys_for_budget(call, scores, 0.2, last=last)
    assert found.index.shape == (2, 3, max_keys(0.2, call.kv.capacity)) and found.all_visible
    for row, (context, count) in enumerate(((10, 2), (45, 9))):
        for head in range(3):
            assert int(found.count[row, head]) == count
            want = [*highest(scores[row, head, : context - last], count - last), *range(context - last, context)]
            assert found.index[row, head, :count].tolist() == want


def test_ranks_draw_the_keys_of_one_process() -> None:
    """Draws follow the number of a head in the whole model, also on a rank of one head."""
    layers = Layers(Dense(), heads=3, slots=2)
    layers.read([0, 1], [44, 9])
    ((call, _),) = layers.decode([1, 0])
    scores = torch.rand(2, 3, call.kv.capacity)
    whole = keys_for_budget(call, scores, 9, choose="sample", seed=4)
    for first, count in ((0, 1), (1, 2), (2, 1)):
        rank = replace(call, shard=HeadShard(first, count, 3))
        found = keys_for_budget(rank, scores[:, first : first + count], 9, choose="sample", seed=4)
        assert torch.equal(found.index, whole.index[:, first : first + count])
        assert found.log_weight is not None and whole.log_weight is not None
        assert torch.equal(found.log_weight, whole.log_weight[:, first : first + count])
    same = torch.rand(1, 1, call.kv.capacity).expand(2, 3, -1)
    apart = keys_for_budget(call, same, 9, choose="sample", seed=4).index
    assert not torch.equal(apart[:, 0], apart[:, 1])


def test_one_set_for_all_ranks_is_drawn_alike() -> None:
    layers = Layers(Dense(), slots=1)
    layers.read([0], [44])
    ((call, _),) = layers.decode([0])
    scores = torch.rand(1, 1, call.kv.capacity)
    ranks = [replace(call, shard=HeadShard(first, 2, 6)) for first in (0, 2, 4)]
    found = [keys_for_budget(x, scores, 9, choose="sample", one_set=True).index for x in (call, *ranks)]
    assert all(torch.equal(found[0], x) for x in found)


@pytest.mark.parametrize("amount", [1, 7, 1000, 0.1, 0.37, 1.0])
@pytest.mark.parametrize("capacity", [1, 6, 37, 500])
def test_no_budget_exceeds_max_keys(amount: int | float, capacity: int) -> None:
    asked = budget(amount, torch.arange(1, capacity + 1))
    assert int(asked.max()) <= max_keys(amount, capacity) <= capacity


@pytest.mark.parametrize("layers", [(), (0,), (0, 5, 6)])
def test_layers(layers: Any) -> None:
    check_layers("layers", layers)
    check_layers_of("layers", layers, 7)


@pytest.mark.parametrize("layers", [(-1,), 0, (2, 1), (1, 1), ("0",), (True,), None, [0]])
def test_layers_that_are_none(layers: Any) -> None:
    with pytest.raises(InvalidInput, match="layers: expected a tuple of layer numbers, ascending"):
        check_layers("layers", layers)


def test_layers_past_the_models() -> None:
    with pytest.raises(InvalidInput, match=r"layers: .* has 3 \(0 to 2\), got layer 3"):
        check_layers_of("layers", (0, 3), 3)


def test_layers_as_deep_in_another_model() -> None:
    assert placed((0, 2, 31), 32, 32) == (0, 2, 31) and placed((2, 8, 18), 32, 16) == (1, 4, 9)
    assert placed((8, 18), 32, 1) == (0,)
