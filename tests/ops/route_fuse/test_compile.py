"""The kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops.carry import CarryMemory, ScanCarry
from longreach.ops.route_fuse import RouterLayer, first_layer, route_fuse, triton, triton_kernels
from longreach.testing.compile import compiling, spilled

dim, dtype, width, routing = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), sys.argv[4]
kv, seq, two = torch.zeros(3, 2, dim, dtype=dtype), torch.arange(3), torch.zeros(2, dtype=dtype)
layer = torch.zeros(3, width, dtype=dtype), torch.zeros(2, width, dtype=dtype), two, routing == "top1"
router = RouterLayer(two, *([] if routing == "fixed" else layer))
memory = CarryMemory.copy_of(ScanCarry.empty(3, 2, 2 * dim))
with patch.object(triton, "refuse", lambda *a: None), compiling(triton_kernels, "first_layer", "route_fuse") as made:
    first_layer(torch.zeros(1, 32 * dim, dtype=dtype), torch.zeros(width, 32 * dim, dtype=dtype), None, impl="triton")
    route_fuse(kv, kv, router, None if routing == "fixed" else two, seq, seq, memory, limit=15.0, impl="triton")
found = [[m.metadata.name, m.metadata.shared, spilled(m), "griddepcontrol.wait" in m.asm["ptx"]] for m in made]
print(json.dumps(found))
"""
CASES = [
    (128, "bfloat16", 64, "learned"),
    (128, "bfloat16", 64, "fixed"),
    (80, "float16", 1000, "top1"),
    (256, "float32", 64, "learned"),
]


@pytest.mark.parametrize(("dim", "dtype", "width", "routing"), swept(CASES, 1))
def test_compiles_for_an_h200(dim: int, dtype: str, width: int, routing: str) -> None:
    kernels = printed(COMPILE, dim, dtype, width, routing)
    assert [name for name, *_ in kernels] == ["first_layer", "route_fuse"]
    for name, shared, spills, waits in kernels:
        assert shared <= SHARED_MEMORY and spills == 0 and waits, name
