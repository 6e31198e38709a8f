"""The kernels compile for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops.scan import ScanCarry, scan, triton, triton_kernels
from longreach.testing.compile import compiling, resident, spilled

dim, dtype, rows, learnt = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
zeros = torch.Tensor.new_zeros  # no kernel runs that would fill new memory
with patch.object(triton, "refuse", lambda *a: None), patch.object(torch.Tensor, "new_empty", zeros):
    x = torch.zeros(rows, 2, dim, dtype=dtype, requires_grad=True)
    decay = torch.full((2,), 0.5, requires_grad=learnt)
    seq, pos = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    with compiling(triton_kernels, "powers", "runs", "ends", "chain", "means", "ends_back", "gradients") as made:
        y, after = scan(x, decay, seq, pos, ScanCarry.empty(1, 2, dim), impl="triton")
        (y.float().sum() + after.mean.sum()).backward()
print(json.dumps([[m.metadata.name, m.metadata.shared, spilled(m), resident(m, m.metadata.num_warps)] for m in made]))
"""
CASES = [
    (256, "bfloat16", 2**17, True),  # keys and values of head dim 128 side by side
    (128, "bfloat16", 600, True),
    (256, "float32", 600, True),
    (128, "float32", 600, False),
    (64, "float16", 600, False),
    (80, "float32", 8, True),
]


@pytest.mark.parametrize(("dim", "dtype", "rows", "learnt"), swept(CASES, 1))
def test_compiles_for_an_h200(dim: int, dtype: str, rows: int, learnt: bool) -> None:
    kernels = printed(COMPILE, dim, dtype, rows, learnt)
    forward, backward = ["powers", "runs", "ends", "chain", "means"], ["ends_back", "chain", "gradients"]
    few = ["powers", "runs", "means", "gradients"]
    assert [name for name, *_ in kernels] == (forward + backward if rows > 64 else few)
    for name, shared, spills, programs in kernels:
        assert shared <= SHARED_MEMORY and spills <= 64, (name, shared, spills)
        assert programs >= (4 if name in ("ends", "means", "ends_back", "gradients") else 1), (name, programs)


FEW = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops.scan import ScanCarry, scan, triton, triton_kernels
from longreach.testing.compile import compiling, spilled

dim, dtype, rows, forgets = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
with patch.object(triton, "refuse", lambda *a: None), compiling(triton_kernels, "few") as made:
    seq, decay = torch.arange(rows), torch.full((2,), 0.5) if forgets else None
    scan(torch.zeros(rows, 2, dim, dtype=dtype), decay, seq, seq, ScanCarry.empty(rows, 2, dim), impl="triton")
print(json.dumps([[m.metadata.name, m.metadata.shared, spilled(m)] for m in made]))
"""


@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "forgets"), swept([(256, "bfloat16", 1, True), (80, "float32", 32, False)], 1)
)
def test_few_rows_compile_for_an_h200(dim: int, dtype: str, rows: int, forgets: bool) -> None:
    ((name, shared, spills),) = printed(FEW, dim, dtype, rows, forgets)
    assert name == "few" and shared <= SHARED_MEMORY and spills == 0
