"""The kernels compile for an H200 where there is none: down to machine code that fits."""

from __future__ import annotations

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from dataclasses import replace
from unittest.mock import patch
import torch
from longreach.ops import Rows
from longreach.ops.match import Ring, Rule, triton, triton_kernels
from longreach.ops.rope import RotaryAngles
from longreach.testing.compile import compiling

dim, found = int(sys.argv[1]), []
with patch.object(triton, "refuse", lambda *a: None):
    for dtype, batch, joined, layout in ((torch.bfloat16, 1, True, "half"), (torch.bfloat16, 32, False, None),
                                         (torch.float32, 8, True, "interleaved")):
        ring = Ring.new(batch, 8, (32, 1032, dim), torch.empty(0, dtype=dtype))
        rows = Rows(torch.randn(batch, 32, dim).to(dtype), torch.arange(batch), torch.arange(batch) + 5000)
        turn = layout and RotaryAngles(*torch.ones(2, batch, dim // 2, dtype=dtype), layout)
        rule = Rule(1024, 256, 77.0, deepest=None if batch == 8 else 32)
        tune = replace(triton.tuning(32 * batch, 1024, dim * dtype.itemsize), joined=joined, chained=True)
        with compiling(triton_kernels, "search", "decide") as made:
            weight = torch.ones(32, dim) if layout else None
            triton.match(rows, torch.arange(batch), ring, rule, turn, weight, tune=tune)
            triton.nearest(rows.q, rows.seq, rows.pos, ring, window=1024, oldest=0, near=1, far=5000, deepest=None,
                           tune=tune)
        found.append([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made])
print(json.dumps(found))
"""


@pytest.mark.parametrize("dim", swept([64, 576, 128], 2))
def test_compiles_for_an_h200(dim: int) -> None:
    names = []
    for kernels in printed(COMPILE, dim):
        names.append([name for name, _, _ in kernels])
        for name, shared, machine_code in kernels:
            assert machine_code and shared <= SHARED_MEMORY, (name, shared)
    assert names == [
        ["search", "search", "decide"],
        ["search", "decide", "search", "decide"],
        ["search", "search", "decide"],
    ]
