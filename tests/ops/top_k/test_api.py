"""The front door of top_k: nothing wrong gets through, and what comes out is what Lists takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.ops import Lists, Rows, Spans, attend, top_k
from longreach.testing.inputs import random_kv

META = torch.device("meta")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(2, 9)}, r"x: expected fp32, fp16 or bf16 \[L, heads, N\], got float32\[2, 9\] on cpu"),
        ({"x": torch.zeros(2, 3, 9, dtype=torch.float64)}, r"x: .* got float64\[2, 3, 9\]"),
        ({"x": [1.0]}, "x: .* got list"),
        (
            {"x": torch.zeros(2, 9, 3).transpose(1, 2)},
            r"x: expected a contiguous last dimension, got strides .27, 1, 3",
        ),
        (
            {"count": torch.zeros(2, dtype=torch.int32)},
            r"count: expected int32 or int64 \[L=2, heads=3\], got int32\[2\]",
        ),
        ({"count": torch.zeros(2, 3)}, r"count: .* got float32\[2, 3\]"),
        ({"count": 3}, "count: .* got int"),
        ({"count": torch.zeros(2, 3, dtype=torch.int32, device=META)}, "count: expected on cpu like x, got .* on meta"),
        ({"length": torch.zeros(3, dtype=torch.int32)}, r"length: expected int32 or int64 \[L=2\] or \[2, heads=3\]"),
        ({"length": torch.zeros(2, 1, dtype=torch.int32)}, r"length: .* got int32\[2, 1\]"),
        ({"length": torch.zeros(2, dtype=torch.bool)}, "length: .* got bool"),
        ({"length": torch.tensor([9, 10])}, r"length: expected in \[0, N=9\], got 9 to 10"),
        ({"length": torch.tensor([-1, 3])}, "length: .* got -1 to 3"),
        ({"first": -1}, r"first: expected an int in \[0, .*, got -1"),
        ({"last": 1.0}, r"last: expected an int in \[0, .*, got 1.0"),
        ({"capacity": 0}, r"capacity: expected an int in \[1, .*, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    right = {
        "x": torch.zeros(2, 3, 9),
        "count": torch.ones(2, 3, dtype=torch.int32),
        "length": torch.tensor([9, 4]),
        "capacity": 4,
    }
    top_k(**right)
    given = right | wrong
    with pytest.raises(InvalidInput, match=message):
        top_k(given.pop("x"), given.pop("count"), given.pop("length"), **given)


def test_an_unknown_implementation_is_refused() -> None:
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(UnknownName, match="unknown impl of top_k 'sort'; known: auto, reference, triton"):
        top_k(torch.zeros(1, 1, 3), one, one, capacity=2, impl="sort")


@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_lists_take_what_comes_out(impl: str) -> None:
    """Lists of scores' largest keys; the one that overflows reads its dense span, and says so."""
    kv = random_kv([20], heads=2, dim=8)
    rows = Rows(torch.randn(1, 4, 8), torch.tensor([0]), torch.tensor([19]))
    x, count = torch.randn(1, 2, 20), torch.tensor([[5, 9]])
    lists = Lists(*top_k(x, count, torch.tensor([20]), capacity=8, impl=impl))
    assert lists.overflowed.tolist() == [[False, True]]
    got = attend(rows, kv, lists, scale=0.3, impl="reference")
    kept = x[0, 0].topk(5).indices.sort().values
    few = attend(rows, kv, Lists(kept[None, None].expand(1, 2, 5), torch.full((1, 2), 5)), scale=0.3, impl="reference")
    all_of_them = attend(rows, kv, Spans.dense(), scale=0.3, impl="reference")
    torch.testing.assert_close(got.out[:, :2], few.out[:, :2])
    torch.testing.assert_close(got.out[:, 2:], all_of_them.out[:, 2:])
