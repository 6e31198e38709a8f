"""append: rows of any strides to places in memory of any layout, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.ops.append import append
from longreach.testing.inputs import random_kv
from tests.ops.attend.kernels import HALF, here
from tests.ops.compiler import printed

impls = pytest.mark.parametrize("impl", ["reference", "triton"])


@impls
@pytest.mark.parametrize("memory", ["plain", "packed", "tokens"])
@pytest.mark.parametrize(("heads", "dim", "dtype"), [(3, 24, torch.float32), (2, 16, HALF), (1, 8, torch.float64)])
def test_rows_lie_where_they_belong(impl: str, memory: Any, heads: int, dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([40, 0, 31], heads=heads, dim=dim, page=7, memory=memory, dtype=dtype)
    held = here(kv)
    before = [x.cpu().clone() for x in (held.k, held.v)]
    k = torch.randn(5, dim, heads).to(dtype).transpose(1, 2)  # strided
    v = torch.randn(heads, 5, dim).to(dtype).transpose(0, 1)
    page, offset = torch.tensor([3, 0, 3, 1, 2]), torch.tensor([0, 6, 5, 2, 2])
    append(held.k, held.v, here(k), here(v), here(page), here(offset), impl=impl)
    for memory_of, was, rows in ((held.k, before[0], k), (held.v, before[1], v)):
        for r in range(5):
            was[page[r], :, offset[r]] = rows[r]
        torch.testing.assert_close(memory_of.cpu(), was, rtol=0, atol=0, equal_nan=True)


@impls
def test_no_row(impl: str) -> None:
    kv = here(random_kv([4], heads=2, dim=8))
    none = here(torch.empty(0, 2, 8)), here(torch.empty(0, 2, 8)), *(here(torch.empty(0).long()) for _ in range(2))
    append(kv.k, kv.v, *none, impl=impl)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": torch.zeros(3, 2, 4)}, r"k: expected torch.float32 \[3, 2, 8\] on cpu, got float32\[3, 2, 4\]"),
        ({"v": torch.zeros(3, 2, 8).half()}, "v: expected torch.float32"),
        ({"page": torch.zeros(3)}, r"page: expected int \[R\] on cpu, got float32"),
        ({"offset": torch.zeros(2).long()}, r"offset: expected int \[R\]"),
        ({"values": torch.zeros(1, 2, 7, 4)}, "values: expected float32"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    given = {
        "keys": torch.zeros(1, 2, 7, 8), "values": torch.zeros(1, 2, 7, 8), "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8), "page": torch.zeros(3).long(), "offset": torch.arange(3),
    } | wrong  # fmt: skip
    with pytest.raises(InvalidInput, match=message):
        append(**given)


def test_who_computes_is_named() -> None:
    memory, rows, place = torch.zeros(1, 2, 7, 8), torch.zeros(3, 2, 8), torch.arange(3)
    with pytest.raises(UnknownName, match="unknown impl of append 'fast'; known: auto, reference, triton"):
        append(memory, memory, rows, rows, torch.zeros_like(place), place, impl="fast")


COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops.append import triton, triton_kernels
from longreach.testing.compile import compiling

with patch.object(triton, "INTERPRETED", False), compiling(triton_kernels, "append_rows") as made:
    for dtype in (torch.bfloat16, torch.float32):
        memory, rows = torch.zeros(2, 8, 64, 128, dtype=dtype), torch.zeros(4, 8, 128, dtype=dtype)
        memory.device  # on a CPU: the launch only compiles
        with patch.object(triton.torch.Tensor, "device", property(lambda self: torch.device("cuda", 0))):
            triton.append(memory, memory, rows, rows, torch.zeros(4).long(), torch.zeros(4).long())
print(json.dumps([[m.metadata.name, "cubin" in m.asm] for m in made]))
"""


def test_compiles_for_an_h200() -> None:
    assert printed(COMPILE) == [["append_rows", True]] * 2
