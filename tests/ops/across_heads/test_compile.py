"""The kernels compile for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

from tests.ops.compiler import printed

COMPILE = """
import json
from unittest.mock import patch
import torch
from longreach.ops import Logits
from longreach.ops.across_heads import triton, triton_kernels
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv, random_rows

found = {}
with patch.object(triton, "refuse", lambda *a: None):
    for group, halves in ((4, True), (7, True), (16, False), (1, False)):
        kv = random_kv([300, 256], heads=2, dim=16)
        rows = random_rows(kv, 2, group=group)
        shape = (2, 2, kv.capacity, group)
        kept = Logits(torch.zeros(shape))
        if halves:
            kept = Logits(torch.zeros(shape).half(), torch.zeros(2, 2, -(-kv.capacity // 64), group), 64)
        ints = torch.ones(2).long()
        with compiling(triton_kernels, "largest", "spread", "rank") as made:
            triton.largest_log_prob(rows, kv, torch.zeros(2, 2 * group), kept)
            ballot = triton.spread_logits(rows, kv, kept, ints, ints, first=4, most=90)
            index = torch.zeros(2, 2 * group, 90).int()
            triton.rank_round_robin(ballot, index, ballot.depth, first_head=0, heads=2 * group)
        found[f"{group} {halves}"] = [[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made]
print(json.dumps(found))
"""


def test_compiles_for_an_h200() -> None:
    cases = printed(COMPILE)
    assert len(cases) == 4
    for case, made in cases.items():
        assert [name for name, _, _ in made] == ["largest", "spread", "rank"], case
        assert all(shared <= 232_448 and cubin for _, shared, cubin in made), (case, made)
