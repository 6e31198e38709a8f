"""Copies by kernels: any dtypes in one launch, and of lists only what is in use."""

from __future__ import annotations

import pytest
import torch

from longreach.ops.triton_copies import copy, copy_lists
from tests.ops.attend.kernels import HALF, here
from tests.ops.compiler import printed


def test_tensors_of_any_dtype_are_copied_at_once() -> None:
    sources = [
        here(x) for x in (torch.randn(3, 5, 8).to(HALF), torch.arange(3000), torch.randn(4), torch.zeros(0),
                          torch.randint(0, 255, (5,), dtype=torch.uint8), torch.randn(3).to(HALF))
    ]  # fmt: skip
    targets = [torch.full_like(x, 77) for x in sources]
    copy(list(zip(sources, targets, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    copy([])


@pytest.mark.parametrize(("source", "target"), [(torch.int64, torch.int32), (torch.uint8, torch.uint8)])
def test_entries_in_use_are_copied(source: torch.dtype, target: torch.dtype) -> None:
    lists = torch.randint(0, 100, (2, 3, 2500)).to(source)
    count = torch.tensor([[5, 2501, 2500], [0, 1024, 2000]], dtype=torch.int32)
    found = here(torch.full((2, 3, 2500), 111).to(target))
    copy_lists(here(lists), found, here(count))
    used = (torch.arange(2500) < count[..., None]) & (count <= 2500)[..., None]
    assert torch.equal(found.cpu(), torch.where(used, lists, 111).to(target))


COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import triton_copies, triton_copies_kernels
from longreach.testing.compile import compiling

with compiling(triton_copies_kernels, "copy_all", "copy_lists") as made:
    some = [torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(5).long(), torch.zeros(3, dtype=torch.uint8)]
    triton_copies.copy([(x, x.clone()) for x in some])
    count = torch.zeros(2, 8, dtype=torch.int32)
    for dtype in (torch.int32, torch.uint8, torch.float32):
        lists = torch.zeros(2, 8, 3000, dtype=dtype)
        triton_copies.copy_lists(lists, lists.clone(), count)
print(json.dumps([[m.metadata.name, "cubin" in m.asm] for m in made]))
"""


def test_compiles_for_an_h200() -> None:
    assert printed(COMPILE) == [["copy_all", True], *[["copy_lists", True]] * 3]
