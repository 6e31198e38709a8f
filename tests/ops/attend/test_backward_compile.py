"""The backward's kernels compile for an H200 where there is none, down to machine code that fits."""

from __future__ import annotations

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import KVView, Lists, Rows, Span, Spans, absolute, relative
from longreach.ops.attend import triton, triton_backward_kernels, triton_kernels, triton_list_backward_kernels
from longreach.ops.attend import triton_merging, triton_pair_backward_kernels, triton_pair_kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling

kind, dim, dtype, group = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
with (
    patch.object(triton, "refuse", lambda *a, **k: None),
    patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm),
    patch.object(triton_kernels, "attend_pieces"), patch.object(triton_merging, "merge_pieces"),
):
    index, count = torch.zeros(256, 2, 3).int(), torch.ones(256, 2).int()
    selection = {
        "spans": Spans((Span(absolute(0), absolute(4)), Span(absolute(torch.zeros(256, 1).int()), relative(1)))),
        "lists": Lists(index, count, torch.zeros(256, 2, 3, requires_grad=True), block=64),
        "pairs": Lists(index, count, block=64),
    }[kind]
    q = torch.zeros(256, 2 * group, dim, dtype=dtype, requires_grad=True)
    k, v = (torch.zeros(1, 2, 256, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    rows, kv = Rows(q, torch.zeros(256).long(), torch.arange(256)), KVView(k, v, torch.tensor([256]))
    with (
        compiling(triton_backward_kernels, "deltas", "spans_dq", "spans_dkv") as shared,
        compiling(triton_list_backward_kernels, "lists_dq", "lists_dkv") as listed,
        compiling(triton_pair_kernels, "pair_keys", "pairs_forward", "pairs_merge", "over_forward") as paired,
        compiling(triton_pair_backward_kernels, "pairs_backward", "blocks_sum", "pairs_dq", "over_dq") as back,
    ):
        got = triton.attend(rows, kv, selection, scale=1.0, softcap=30.0 if dim == 64 else None, sink_logit=None)
        (got.out.sum() + got.lse.sum()).backward()
print(json.dumps([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in shared + listed + paired + back]))
"""
KERNELS = {
    "spans": ["deltas", "spans_dq", "spans_dkv"],
    "lists": ["deltas", "spans_dkv", "lists_dq", "lists_dkv"],
    "pairs": [
        "deltas",
        "pair_keys",
        "pairs_forward",
        "pairs_merge",
        "over_forward",
        "pair_keys",
        "pairs_backward",
        "blocks_sum",
        "pairs_dq",
        "over_dq",
    ],
}
CASES = [
    ("pairs", 128, "bfloat16", 4), ("spans", 128, "bfloat16", 4), ("lists", 128, "bfloat16", 4),
    ("spans", 64, "float16", 1), ("pairs", 80, "bfloat16", 7), ("pairs", 256, "bfloat16", 8),
    ("spans", 128, "float32", 16), ("pairs", 64, "float32", 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "dim", "dtype", "group"), swept(CASES, 1))
def test_compiles_for_an_h200(kind: str, dim: int, dtype: str, group: int) -> None:
    found = printed(COMPILE, kind, dim, dtype, group)
    assert [name for name, _, _ in found] == KERNELS[kind]
    assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in found), found
