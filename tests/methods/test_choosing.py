"""What methods share: the best entries in ascending order, layer numbers, the longest list of a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.base import budget
from longreach.methods.choosing import best, check_layers, check_layers_of, most


def lists(index: torch.Tensor, count: torch.Tensor) -> list[list[list[int]]]:
    return [[x[:n].tolist() for x, n in zip(row, counts, strict=True)] for row, counts in zip(index, count.tolist())]


def test_the_best_in_ascending_order() -> None:
    scores = torch.tensor([[[3.0, 9.0, 1.0, 9.0, 5.0, torch.nan]], [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]])
    count, length = torch.tensor([[3], [2]]), torch.tensor([[5], [6]])
    index, used = best(scores, count, length, capacity=4)
    assert index.shape == (2, 1, 4) and index.dtype == torch.int32
    assert lists(index, used) == [[[1, 3, 4]], [[0, 1]]]


def test_the_last_ones_come_first() -> None:
    scores = torch.tensor([[[3.0, 9.0, 1e30, 7.0, -1e30, 8.0]]])
    for count, length, want in ((1, 5, [4]), (2, 5, [2, 4]), (3, 5, [1, 2, 4]), (9, 3, [0, 1, 2]), (2, 6, [2, 5])):
        index, used = best(scores, torch.tensor([[count]]), torch.tensor([[length]]), capacity=9, last=1)
        assert lists(index, used) == [[want]]
    index, used = best(scores, torch.tensor([[2]]), torch.tensor([[6]]), capacity=2, last=2)
    assert lists(index, used) == [[[4, 5]]]


def test_heads_choose_apart() -> None:
    scores = torch.randn(3, 4, 50)
    count, length = torch.tensor([[7], [50], [1]]), torch.tensor([[30], [50], [9]])
    index, used = best(scores, count, length, capacity=50)
    for row in range(3):
        for head in range(4):
            n, within = int(used[row, head]), int(length[row])
            assert n == min(int(count[row]), within)
            want = scores[row, head, :within].topk(n).indices.sort().values
            assert torch.equal(index[row, head, :n].long(), want)


@pytest.mark.parametrize("amount", [1, 7, 1000, 0.1, 0.37, 1.0])
@pytest.mark.parametrize("capacity", [1, 6, 37, 500])
def test_no_list_is_longer_than_most(amount: int | float, capacity: int) -> None:
    asked = budget(amount, torch.arange(1, capacity + 1))
    assert int(asked.max()) <= most(amount, capacity) <= capacity


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
