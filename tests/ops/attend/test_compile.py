"""Every kernel compiles for an H200 where there is none: no interpreter, no GPU, down to machine code that fits."""

from __future__ import annotations

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import Lists, Rows, RowRange, Span, Spans, absolute, relative
from longreach.ops.attend import triton, triton_kernels, triton_merging
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

dim = int(sys.argv[1])
found = {}
with patch.object(triton, "refuse", lambda *a: None), patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm):
    for kind, dtype, page, rows in (
        ("dense", torch.bfloat16, None, 1), ("spans", torch.bfloat16, 16, 1), ("lists", torch.bfloat16, 16, 1),
        ("dense", torch.float16, None, 8), ("dense", torch.float32, None, 1), ("dense", torch.bfloat16, None, 200),
        ("dense", torch.float32, 64, 200),
    ):
        kv = random_kv([256, 256], heads=2, dim=dim, page=page, dtype=dtype)
        seq = torch.arange(2).repeat_interleave(rows)
        pos = (256 - rows + torch.arange(rows)).repeat(2)
        given = Rows(torch.randn(2 * rows, 8, dim).to(dtype), seq, pos, (RowRange(rows, 0), RowRange(rows, 1)))
        selection = {
            "dense": Spans.dense(),
            "spans": Spans(
                (Span(absolute(0), absolute(4)), Span(relative(torch.full((2 * rows, 8), -63)), relative(1))), "query"
            ),
            "lists": Lists(torch.zeros(2, 2, 128).int(), torch.ones(2, 2).int(), torch.zeros(2, 2, 128)),
        }[kind]
        with compiling(triton_kernels, "attend_pieces") as made, compiling(triton_merging, "merge_pieces") as merged:
            triton.launch(given, kv, selection, scale=1.0, softcap=None, sink_logit=None, split=None)
        both = made + merged
        found[f"{kind} {dtype} {page} {rows}"] = [[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in both]
print(json.dumps(found))
"""


KEEPING = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import Lists, Logits, Rows, RowRange, ScoringKeys, Spans
from longreach.ops.attend import triton, triton_two_pass, triton_kernels, triton_merging
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

dim, found = int(sys.argv[1]), {}
bare = dict(scale=1.0, softcap=None, sink_logit=None)
with (
    patch.object(triton_two_pass, "refuse", lambda *a: None),
    patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm),
):
    cases = (
        ("keep", torch.bfloat16, None, 1, 4), ("keep", torch.float32, 64, 3, 7), ("score", torch.bfloat16, 16, 1, 4),
        ("score", torch.float16, None, 16, 8), ("score", torch.float32, None, 1, 1),
        ("values", torch.bfloat16, None, 1, 4), ("values", torch.bfloat16, 16, 1, 7),
        ("values", torch.float32, None, 1, 2), ("dense values", torch.float16, None, 3, 8),
        ("values per query", torch.bfloat16, None, 1, 4), ("8 bits", torch.bfloat16, None, 1, 4),
        ("8 bits", torch.bfloat16, 16, 1, 8), ("8 bits", torch.float32, 64, 5, 7),
    )
    for kind, dtype, page, rows, group in cases if dim == 128 else cases[dim // 16 % 2 :: 2]:
        kv = random_kv([256, 256], heads=2, dim=dim, page=page, dtype=dtype)
        seq = torch.arange(2).repeat_interleave(rows)
        pos = (256 - rows + torch.arange(rows)).repeat(2)
        q = torch.randn(2 * rows, 2 * group, dim).to(dtype)
        given = Rows(q, seq, pos, (RowRange(rows, 0), RowRange(rows, 1)))
        shape = (2 * rows, 2, kv.capacity, group)
        kept = Logits(torch.zeros(shape))
        if dtype != torch.float32:
            kept = Logits(torch.zeros(shape).half(), torch.zeros(*shape[:2], -(-kv.capacity // 64), group), 64)
        heads = 2 * group if kind == "values per query" else 2
        index, count = torch.zeros(2 * rows, heads, 128).int(), torch.ones(2 * rows, heads).int()
        lists = Lists(index, count, per="kv" if heads == 2 else "query")
        with compiling(triton_kernels, "attend_pieces") as made, compiling(triton_merging, "merge_pieces") as merged:
            if kind == "keep":
                triton_two_pass.attend_with_logits(given, kv, **bare)
            elif kind == "score":
                triton_two_pass.score_keys(given, kv, **bare)
            elif kind == "8 bits":
                keys = ScoringKeys(torch.zeros(kv.k.shape, dtype=torch.int8), torch.zeros(kv.k.shape[:3]))
                triton_two_pass.score_keys(given, kv, **bare, keys=keys)
            else:
                chosen = Spans.dense() if kind == "dense values" else lists
                triton_two_pass.attend_from_logits(given, kv, chosen, kept, sink_logit=None)
        case = f"{kind} {dtype} {page} {rows} {group}"
        found[case] = [[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made + merged]
print(json.dumps(found))
"""


@pytest.mark.parametrize("source", [COMPILE, KEEPING], ids=["attend", "keeping"])
@pytest.mark.parametrize("dim", swept([64, 32, 80, 96, 128, 256], 1))
def test_compiles_for_an_h200(dim: int, source: str) -> None:
    for case, kernels in printed(source, dim).items():
        assert kernels[0][0] == "attend_pieces", case
        for name, shared, machine_code in kernels:
            assert machine_code and shared <= SHARED_MEMORY, (case, name, shared)


WIDE = """
import json
from dataclasses import replace
from unittest.mock import patch
import torch
from longreach.ops import Lists, Rows, RowRange, Spans
from longreach.ops.attend import triton, triton_two_pass, triton_merging, triton_wide_kernels
from longreach.ops.attend.triton_tuning import Tuning
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv

found = []
with (
    patch.object(triton, "refuse", lambda *a: None),
    patch.object(triton_two_pass, "refuse", lambda *a: None),
    patch.object(Tuning, "programs", lambda s, d: 132 * s.per_sm),
):
    for kind, dim, group, page, rows in (
        ("lists", 576, 128, 16, 1), ("score", 512, 8, 16, 1), ("dense", 576, 64, 16, 300),
    ):
        kv = random_kv([512], heads=1, dim=dim, page=page, dtype=torch.bfloat16)
        kv = replace(kv, v=kv.k, values_in_keys=True) if group == 128 else kv
        pos = 512 - rows + torch.arange(rows)
        given = Rows(torch.zeros(rows, group, dim).bfloat16(), torch.zeros(rows).long(), pos, (RowRange(rows, 0),))
        lists = Lists(torch.zeros(rows, 1, 128).int(), torch.ones(rows, 1).int())
        with compiling(triton_wide_kernels, "attend_wide") as made, compiling(triton_merging, "merge_pieces") as merged:
            bare = dict(scale=1.0, softcap=None, sink_logit=None)
            if kind == "score":
                triton_two_pass.score_keys(given, kv, **bare)
            else:
                triton.launch(given, kv, lists if kind == "lists" else Spans.dense(), split=None, **bare)
        found += [[m.metadata.name, m.metadata.shared, "cubin" in m.asm] for m in made + merged]
print(json.dumps(found))
"""


def test_wide_heads_compile_for_an_h200() -> None:
    kernels = printed(WIDE)
    assert [name for name, *_ in kernels] == [*["attend_wide", "merge_pieces"] * 2, "attend_wide"]
    assert all(machine_code and shared <= SHARED_MEMORY for _, shared, machine_code in kernels), kernels


JOIN = """
import json
import torch
from longreach.ops.attend import triton_join
from longreach.testing.compile import compiling, spilled

results = [(torch.zeros(1, 32, 300, 128, dtype=torch.bfloat16), torch.zeros(1, 32, 300)) for _ in range(2)]
with compiling(triton_join, "_join") as made:
    triton_join.join(*results, torch.empty(300, 32, 128), torch.empty(300, 32))
print(json.dumps([[m.metadata.name, m.metadata.shared, spilled(m)] for m in made]))
"""


def test_the_join_of_two_results_compiles() -> None:
    ((name, shared, spills),) = printed(JOIN)
    assert name == "_join" and shared <= SHARED_MEMORY and spills == 0
