"""The kernels compile for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from dataclasses import replace
from unittest.mock import patch
import torch
from longreach.ops.block_bounds import bound_and_score, bound_blocks, triton, triton_kernels, units_per_page
from longreach.ops.types import RowRange
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv, random_rows

found = {}
with patch.object(triton, "refuse", lambda *a: None), patch.object(triton.Tuning, "programs", lambda s, d: 132):
    for dim, group, dtype, page, per in (
        (128, 4, torch.bfloat16, None, 16), (128, 8, torch.bfloat16, 64, 16), (256, 16, torch.float32, 16, 24),
        (64, 1, torch.float16, 48, 32), (72, 7, torch.bfloat16, None, 100),
    ):
        kv = random_kv([300, 256], heads=2, dim=dim, page=page, dtype=dtype)
        bounds = torch.zeros(kv.k.shape[0], 2, units_per_page(kv.page, per), dim, dtype=dtype)
        rows = replace(random_rows(kv, 2, group=group), runs=(RowRange(1, 0), RowRange(1, 1)))
        with compiling(triton_kernels, "bound", "score") as made:
            bound_and_score(rows, kv, bounds, bounds, per, impl="triton")
            bound_blocks(kv, bounds, bounds, rows.seq % 1, rows.seq, per, impl="triton")
        found[f"{dim} {group} {dtype} {page} {per}"] = [
            [m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made
        ]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 5
    for case, kernels in cases.items():
        assert [name for name, _, _ in kernels] == ["score", "bound"], case
        assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in kernels), (case, kernels)
