"""The kernels compile for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

import json

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import RowRange, Rows
from longreach.ops.recall import recall, triton, triton_kernels
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

width, group, dtype, page, count, pool, many = json.loads(sys.argv[1])
with patch.object(triton, "refuse", lambda *a: None), patch.object(triton.Tuning, "programs", lambda s, d: 528):
    blocks = random_kv([300, 256], heads=2, dim=width, page=page, dtype=getattr(torch, dtype))
    total = 9000 if many else 2
    seq = torch.arange(total) * 2 // total
    rows = Rows(torch.zeros(total, 2 * group, width, dtype=blocks.k.dtype), seq, seq)
    start = torch.zeros_like(seq) if many else None
    with compiling(triton_kernels, "score", "choose", "score_and_choose") as made:
        recall(rows, blocks, start, blocks.seq_lens[seq], count=count, scale=0.1, pool=pool, impl="triton")
print(json.dumps([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made]))
"""
CODE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import BlockCode, RotaryFrequencies, RowRange, Rows
from longreach.ops.recall import code_blocks, code_completed, code_rows, planes_of, triton_code_kernels, triton_codes
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

kind, dim, rotary, layout, dtype, page, per = json.loads(sys.argv[1])
with patch.object(triton_codes, "refuse", lambda *a: None):
    kv = random_kv([300, 256], heads=2, dim=dim, page=page, dtype=getattr(torch, dtype))
    code = BlockCode(kind, RotaryFrequencies(torch.ones(rotary // 2), layout), planes_of(dim, 128, 0))
    codes = torch.zeros(*kv.k.shape[:2], -(-kv.page // per), code.width(dim), dtype=kv.k.dtype)
    seq = torch.arange(2)
    rows = Rows(torch.zeros(2, 8, dim, dtype=kv.k.dtype), seq, seq)
    with compiling(triton_code_kernels, "code", "code_query") as made:
        code_blocks(kv, codes, code, seq, seq, per, impl="triton")
        code_completed(rows, kv, codes, code, per, impl="triton")
        code_rows(rows, code, impl="triton")
print(json.dumps([[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made]))
"""
CODES = [
    ("summary", 128, 128, "half", "bfloat16", None, 64),
    ("hash", 128, 64, "interleaved", "bfloat16", 64, 64),
    ("bounds", 128, 128, "half", "bfloat16", 16, 64),
    ("hash", 72, 72, "half", "float32", None, 5),
    ("summary", 256, 64, "half", "float16", 32, 16),
]
CASES = [
    (128, 4, "bfloat16", None, 8, "softmax", False),
    (128, 4, "bfloat16", 1, 8, "softmax", True),
    (256, 8, "bfloat16", 4, 64, "sum", False),
    (128, 1, "float16", None, 3, "sum", True),
    (72, 7, "float32", 16, 512, "softmax", False),
    (256, 16, "float32", None, 16, "softmax", True),
]


@pytest.mark.parametrize(("case",), swept([(case,) for case in CASES], 2))
def test_compiles_for_an_h200(case: tuple[object, ...]) -> None:
    kernels = printed(COMPILE, json.dumps(case))
    fused = case[-1] and case[4] <= 32
    assert [name for name, _, _ in kernels] == (["score_and_choose"] if fused else ["score", "choose"])
    assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in kernels), kernels


@pytest.mark.parametrize(("case",), swept([(case,) for case in CODES], 3))
def test_codes_compile_for_an_h200(case: tuple[object, ...]) -> None:
    kernels = printed(CODE, json.dumps(case))
    assert [name for name, _, _ in kernels] == ["code", "code", *["code_query"] * (case[0] != "summary")]
    assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin in kernels), kernels
