"""The kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import Lists, Partial, sampling_variance
from longreach.ops.variance import triton, triton_kernels
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv, random_rows

found = {}
with patch.object(triton, "refuse", lambda *a: None):
    for dim, group, dtype, page, per, softcap in (
        (128, 4, torch.bfloat16, None, "kv", None), (128, 8, torch.bfloat16, 64, "query", None),
        (64, 1, torch.float16, 16, "kv", 30.0), (72, 7, torch.float32, None, "query", None),
        (256, 16, torch.float32, 48, "kv", 50.0),
    ):
        kv = random_kv([70, 50], heads=2, dim=dim, page=page, dtype=dtype)
        rows = random_rows(kv, 2, group=group)
        heads = 2 if per == "kv" else 2 * group
        index = torch.arange(9, dtype=torch.int32).expand(2, heads, 9).contiguous()
        lists = Lists(index, index[..., 0] + 9, torch.zeros(index.shape) if group > 1 else None, per)
        with compiling(triton_kernels, "deviations") as made:
            whole = Partial.empty(2, 2 * group, dim)
            sampling_variance(
                rows, kv, lists, torch.ones(index.shape), whole, scale=0.1, softcap=softcap, impl="triton"
            )
        found[f"{dim} {group} {dtype} {page} {per}"] = [
            [m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made
        ]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 5
    for case, kernels in cases.items():
        assert [name for name, _, _ in kernels] == ["deviations"], case
        assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in kernels), (case, kernels)
