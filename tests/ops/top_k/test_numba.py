"""top_k's Numba kernel is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.ops import top_k
from longreach.ops.top_k import IMPLEMENTATIONS
from tests.ops.top_k.brute import hard_rows, held_to


def check(x: Tensor, count: Tensor, length: Tensor, **options: Any) -> None:
    options = {"first": 0, "last": 0, "capacity": x.shape[2], **options}
    index, used = top_k(x, count, length, **options, impl="numba")
    held_to(index, used, x, count, length, options["first"], options["last"])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.45, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_all_kinds(share: float, dtype: torch.dtype, workers: int) -> None:
    """What lies past the length is poison."""
    x = torch.cat([hard_rows(1500), torch.full((1, 15, 104), torch.nan)], -1).to(dtype)
    count = torch.full((1, x.shape[1]), int(share * 1500))
    for first, last in ((0, 0), (3, 17), (900, 2000)):
        check(x, count, torch.tensor([1500]), first=first, last=last)


def test_counts_and_lengths() -> None:
    """Each row its own: nothing wanted, everything, more than there is, more than fits, rows of one column or none."""
    x = torch.randn(4, 3, 1501)
    count = torch.tensor([[0, 1, 1501], [4000, 150, 400], [5, -2, 1], [7, 20, 0]], dtype=torch.int32)
    length = torch.tensor([[1501, 1501, 1501], [1500, 700, 1100], [4, 30, 1], [0, 33, 0]], dtype=torch.int32)
    check(x, count, length, capacity=450)
    check(x[:2], count[:2], length[:2, 0], first=100, last=120, capacity=2000)
    check(x, count, length, first=2, last=3, capacity=1)


@pytest.mark.parametrize("k", range(13))
def test_first_and_last_columns_within_small_counts(k: int) -> None:
    x, one = torch.randn(1, 2, 12), torch.full((1, 2), k)
    for first, last in ((4, 3), (12, 0), (0, 12), (8, 8)):
        check(x, one, torch.tensor([[12, 9]]), first=first, last=last)


def test_strided_scores_and_none() -> None:
    wide = torch.randn(3, 4, 50).transpose(0, 1)
    check(wide[1:, :, :33], torch.full((3, 3), 9), torch.tensor([33, 7, 20]))
    check(torch.zeros(1, 2, 40).expand(3, -1, -1), torch.full((3, 2), 9), torch.tensor([33, 7, 20]))
    none = torch.zeros(0, 2, dtype=torch.int64)
    index, used = top_k(torch.zeros(0, 2, 5), none, none[:, 0], capacity=3, impl="numba")
    assert index.shape == (0, 2, 3) and used.shape == (0, 2)
    check(torch.zeros(1, 2, 0), torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), capacity=2)


def test_auto_on_a_cpu() -> None:
    x = torch.zeros(1, 1, 3)
    assert IMPLEMENTATIONS.choose("auto", x.device, x) == "numba"
