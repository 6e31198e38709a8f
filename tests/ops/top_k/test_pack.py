"""pack_lists: lists behind one another, by either implementation."""

from __future__ import annotations

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.ops import pack_lists
from tests.ops.attend.kernels import here

IMPLS = ["reference", "triton"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_lists_stand_behind_one_another(impl: str, ints: torch.dtype) -> None:
    used = torch.randint(0, 150, (5, 3), dtype=torch.int32)
    used[2] = 0
    index = torch.randint(-(2**31), 2**31 - 1, (5, 3, 150), dtype=torch.int32)
    offsets = torch.nn.functional.pad(used.flatten().cumsum(0), (1, 0)).to(ints) + 7
    into = torch.full((int(offsets[-1]) + 4,), -5, dtype=torch.int32)
    got = here(into)
    pack_lists(here(index), here(used), here(offsets), got, impl=impl)
    want = [int(x) for lists, counts in zip(index, used, strict=True) for x, n in zip(lists, counts, strict=True)
            for x in x[:n]]  # fmt: skip
    assert got.cpu().tolist() == [-5] * 7 + want + [-5] * 4


@pytest.mark.parametrize("impl", IMPLS)
def test_what_has_no_place_is_left_out(impl: str) -> None:
    index, used = torch.arange(8, dtype=torch.int32).view(1, 2, 4), torch.tensor([[3, 4]], dtype=torch.int32)
    into = here(torch.full((6,), -1, dtype=torch.int32))
    pack_lists(here(index), here(used), here(torch.tensor([0, 2, 5])), into, impl=impl)
    assert into.cpu().tolist() == [0, 1, 4, 5, 6, -1]


def test_what_does_not_fit_is_refused() -> None:
    index, used = torch.zeros(1, 2, 4, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    offsets, into = torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    for given, message in (
        ((index.long(), used, offsets, into), "index: expected int32"),
        ((index, used[:, :1], offsets, into), "used: expected int32"),
        ((index, used, offsets[1:], into), "offsets: expected int32 or int64"),
        ((index, used, offsets, into[::2]), "into: expected int32"),
    ):
        with pytest.raises(InvalidInput, match=message):
            pack_lists(*given)
