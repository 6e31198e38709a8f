"""The kernels compile for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

import json

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import RowRange, Rows
from longreach.ops.recall import recall, triton, triton_kernels
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

width, group, dtype, page, count, pool, many = json.loads(sys.argv[1])
with patch.object(triton, "refuse", lambda *a: None), patch.object(triton.Tuning, "programs", lambda s, d: 528):
    blocks = random_kv([300, 256], heads=2, dim=width, page=page, dtype=getattr(torch, dtype))
    total = 200 if many else 2
    seq = torch.arange(total) * 2 // total
    rows = Rows(torch.zeros(total, 2 * group, width, dtype=blocks.k.dtype), seq, seq)
    start = torch.zeros_like(seq) if many else None
    with compiling(triton_kernels, "score", "choose") as made:
        recall(rows, blocks, start, blocks.seq_lens[seq], count=count, scale=0.1, pool=pool, impl="triton")
print(json.dumps([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made]))
"""
CASES = [
    (128, 4, "bfloat16", None, 8, "softmax", False),
    (128, 4, "bfloat16", 1, 8, "softmax", True),
    (256, 8, "bfloat16", 4, 64, "sum", False),
    (128, 1, "float16", None, 3, "sum", True),
    (72, 7, "float32", 16, 512, "softmax", False),
    (256, 16, "float32", None, 16, "softmax", True),
]


@pytest.mark.parametrize(("case",), swept([(case,) for case in CASES], 2))
def test_compiles_for_an_h200(case: tuple[object, ...]) -> None:
    kernels = printed(COMPILE, json.dumps(case))
    assert [name for name, _, _ in kernels] == ["score", "choose"]
    assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in kernels), kernels
