"""The kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import Logits, Rows
from longreach.ops.pooled_scores import triton, triton_kernels, triton_tiles
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

found = {}
with patch.object(triton, "refuse", lambda *a: None):
    for group in (1, 4, 7, 8, 16):
        for halves in (True, False):
            kv = random_kv([300, 256], heads=2, dim=32)
            rows = Rows(torch.randn(2, 2 * group, 32), torch.arange(2), torch.arange(2))
            shape = (2, 2, kv.capacity, group)
            kept = Logits(torch.zeros(shape))
            if halves:
                kept = Logits(torch.zeros(shape).half(), torch.zeros(2, 2, -(-kv.capacity // 64), group), 64)
            given = {"scale": 1.0, "softcap": None, "lse": torch.zeros(2, 2 * group), "kept": kept}
            with compiling(triton_kernels, "pool") as made, compiling(triton_tiles, "pool_tiles") as more:
                triton.pooled_scores(rows, kv, **given, tile=None, tiles=None)
                triton.pooled_scores(rows, kv, **given, tile=torch.arange(2), tiles=2)
            found[f"{group} {halves}"] = [[m.metadata.shared, "cubin" in m.asm] for m in (*made, *more)]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 10
    for case, kernels in cases.items():
        assert len(kernels) == 2, (case, kernels)
        assert all(shared <= SHARED_MEMORY and compiled for shared, compiled in kernels), (case, kernels)
