"""The kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops.project import project, project_keys, triton, triton_kernels
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv, random_rows

found = {}
with patch.object(triton, "refuse", lambda *a: None):
    for dim, width, group, dtype, page, rows in (
        (128, 32, 4, torch.bfloat16, None, 2), (128, 24, 8, torch.bfloat16, 64, 70),
        (256, 256, 16, torch.float32, 16, 2), (64, 16, 1, torch.float16, 48, 4), (72, 40, 7, torch.bfloat16, None, 100),
    ):
        kv = random_kv([300, 256], heads=2, dim=dim, page=page, dtype=dtype)
        given = random_rows(kv, rows, group=group)
        basis, out = torch.zeros(2, dim, width, dtype=dtype), torch.zeros(*kv.k.shape[:3], width, dtype=dtype)
        with compiling(triton_kernels, "project_rows") as made:
            project(given, kv, basis, out, impl="triton")
            project_keys(given, kv, basis, out, impl="triton")
        found[f"{dim} {group} {dtype} {page} {width}"] = [[m.metadata.shared, "cubin" in m.asm] for m in made]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 5
    for case, kernels in cases.items():
        assert len(kernels) == 2 and all(s <= SHARED_MEMORY and cubin for s, cubin in kernels), (case, kernels)
