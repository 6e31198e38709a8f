"""Every kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops.top_k import triton, triton_kernels, triton_sample
from longreach.testing.compile import compiling

found = {}
with patch.object(triton, "INTERPRETED", True):  # launched on CPU tensors, but nothing is run
    for rows, columns, dtype, ints in (
        (256, 131072, torch.float32, torch.int32), (8, 131072, torch.float32, torch.int64),
        (8, 131071, torch.bfloat16, torch.int32), (64, 32768, torch.float16, torch.int32),
        (512, 8192, torch.float32, torch.int32), (1, 1, torch.float32, torch.int32),
    ):
        x = torch.empty(rows, 1, columns, dtype=dtype)  # never touched, so never there
        count, length = torch.zeros(rows, 1, dtype=ints), torch.zeros(rows, dtype=ints)
        with compiling(triton_sample, "bracket") as first, compiling(triton, "short") as held, \\
             compiling(triton_kernels, "classify", "resolve", "write") as made:
            triton.launch(x, count, length, first=4, last=64, capacity=16384)
        found[f"{rows} {columns} {dtype} {ints}"] = [
            [m.metadata.name, m.metadata.shared, "cubin" in m.asm, m.asm["ptx"].count("ld.global.v4.b32")]
            for m in first + made + held
        ]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    found = printed(COMPILE)
    assert len(found) == 6
    for case, kernels in found.items():
        names = [name for name, *_ in kernels]
        short = int(case.split()[1]) <= 8192
        assert names == (["short"] if short else ["bracket", "classify", "resolve", "write"]), case
        for name, shared, machine_code, _ in kernels:
            assert machine_code and shared <= SHARED_MEMORY, (case, name, shared)
    (vectors,) = (v for name, _, _, v in found["256 131072 torch.float32 torch.int32"] if name == "classify")
    assert vectors >= 8, "rows are not read in vectors"
