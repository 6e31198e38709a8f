"""Every kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import SHARED_MEMORY, printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops.sample import triton, triton_kernels
from longreach.testing.compile import compiling

found = {}
with patch.object(triton, "refuse", lambda *a: None):  # launched on CPU tensors, but nothing is run
    for rows, columns, dtype, ints, power, offsets in (
        (8, 131072, torch.float32, torch.int64, 1.0, torch.float64),
        (1, 1000003, torch.float32, torch.int32, 0.5, torch.float64),
        (256, 32768, torch.bfloat16, torch.int32, 2.0, torch.float32),
        (600, 8193, torch.float16, torch.int64, 1.0, torch.float64),
        (8, 8192, torch.float32, torch.int64, 0.5, torch.float64),
        (1, 1, torch.float64, torch.int32, 1.5, torch.float32),
    ):
        x = torch.empty(rows, 1, columns, dtype=dtype)  # never touched, so never there
        count, length = torch.zeros(rows, 1, dtype=ints), torch.zeros(rows, dtype=ints)
        with compiling(triton_kernels, "alone", "total", "look", "write") as made:
            triton.sample(
                x, count, length, torch.zeros(rows, 1, dtype=offsets), capacity=4096, uniform=0.05, power=power,
                first=4, last=64,
            )
        found[f"{rows} {columns} {dtype} {ints} {power}"] = [
            [m.metadata.name, m.metadata.shared, "cubin" in m.asm, m.asm["ptx"].count("fma.rn.f64")] for m in made
        ]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    found = printed(COMPILE)
    assert len(found) == 6
    for case, kernels in found.items():
        _, columns, _, _, power = case.split()
        split = int(columns) > 8192
        names = ["total", "look", "look", "look", "write"] if split else ["alone"]
        assert [name for name, *_ in kernels] == names, case
        for name, shared, machine_code, fused in kernels:
            assert machine_code and shared <= SHARED_MEMORY, (case, name, shared)
            # one kernel must not round a weight differently from another
            assert not fused or power not in ("0.5", "1.0"), (case, name)
