"""The reference of top_k against sorting by Python."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longreach.ops import top_k
from tests.ops.top_k.brute import brute, hard_rows, held_to

VALUES = (0.0, -0.0, 1.0, 1.0, -2.5, 1e-42, -1e-42, 3e38, float("inf"), -float("inf"), float("nan"))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_case(seed: int) -> None:
    dice = random.Random(seed)
    lists, heads, columns = dice.choice((1, 2)), dice.choice((1, 3)), dice.choice((0, 1, 2, 7, 33))
    dtype = dice.choice((torch.float32, torch.float16, torch.bfloat16))
    drawn = [dice.choice((*VALUES, dice.gauss(0, 1))) for _ in range(lists * heads * columns)]
    x = torch.tensor(drawn, dtype=dtype).view(lists, heads, columns)
    count = torch.tensor([dice.randint(-1, columns + 3) for _ in range(lists * heads)]).view(lists, heads)
    shape = dice.choice(((lists,), (lists, heads)))
    length = torch.randint(0, columns + 1, shape, generator=torch.Generator().manual_seed(seed))
    first, last = dice.choice((0, 1, 3)), dice.choice((0, 2, 5))
    capacity = dice.choice((1, 4, 40))
    index, used = top_k(x, count, length, first=first, last=last, capacity=capacity, impl="reference")
    assert index.shape == (lists, heads, capacity)
    held_to(index, used, x, count, length, first, last)


@pytest.mark.parametrize("k", [0, 1, 30, 150, 299, 300])
def test_rows_of_all_kinds(k: int) -> None:
    x = hard_rows(300)
    count = torch.full((1, x.shape[1]), k)
    held_to(*top_k(x, count, torch.tensor([300]), capacity=300, impl="reference"), x, count, torch.tensor([300]))


def test_the_oracle_itself() -> None:
    """By hand: larger first, ties to the lower column, the last ones before the first before all others."""
    scores = [5.0, 1.0, 9.0, float("nan"), 9.0, -float("inf"), 0.0, -0.0]
    assert brute(scores, 1, 0, 0) == [2]
    assert brute(scores, 4, 0, 0) == [0, 1, 2, 4]
    assert brute(scores, 5, 0, 0) == [0, 1, 2, 4, 6]
    assert brute(scores, 7, 0, 0) == [0, 1, 2, 4, 5, 6, 7]
    assert brute(scores, 3, 2, 2) == [0, 6, 7]
    assert brute(scores, 5, 2, 2) == [0, 1, 2, 6, 7]
    assert brute(scores, 1, 2, 2) == [7]
    assert brute(scores, 99, 2, 2) == list(range(8))


def test_no_list() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    index, used = top_k(torch.zeros(0, 2, 5), none.view(0, 1).expand(0, 2), none, capacity=3, impl="reference")
    assert index.shape == (0, 2, 3) and used.shape == (0, 2)
