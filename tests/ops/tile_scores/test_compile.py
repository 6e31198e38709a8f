"""The kernels of a prompt's tiles compile for an H200 where there is none, and products use the tensor cores."""

from __future__ import annotations

import json

import pytest

from tests.ops.compiler import SHARED_MEMORY, printed
from tests.tiers import swept

COMPILE = """
import json, sys
from unittest.mock import patch
import torch
from longreach.ops import attend, pack_lists, tile_log_sums, tile_scores
from longreach.ops.attend import triton as attending, triton_prompt_tiles_kernels
from longreach.ops.tile_scores import triton, triton_kernels
from longreach.ops.top_k import triton_pack
from longreach.testing.compile import compiling
from longreach.testing.inputs import random_kv
from longreach.testing.selections import prompt_tiles

dim, group, tokens, page, dtype, softcap = json.loads(sys.argv[1])
nothing = lambda *given, **more: None
with patch.object(attending, "refuse", nothing), patch.object(triton, "refuse", nothing):
    kv = random_kv([300, 256], heads=2, dim=dim, page=page, dtype=getattr(torch, dtype))
    rows, selection = prompt_tiles(kv, group, tokens, mapped=2 if page else None, seed=1)
    given = {"scale": 0.1, "softcap": softcap, "impl": "triton"}
    sink = torch.zeros(rows.q.shape[1]) if softcap else None
    with compiling(triton_prompt_tiles_kernels, "attend_tiles") as first, \\
            compiling(triton_kernels, "score", "log_sums") as more:
        attend(rows, kv, selection, sink_logit=sink, **given)
        tile_log_sums(rows, kv, selection.tiles, sink_logit=sink, **given)
        tile_log_sums(rows, kv, selection.tiles, every=16, **given)
        tile_scores(rows, kv, selection.tiles, torch.zeros(rows.q.shape[:2]), columns=300, **given)
print(json.dumps([
    [m.metadata.name, m.metadata.shared, "cubin" in m.asm, "wgmma.mma_async" in m.asm["ptx"],
     "cp.async.cg" in m.asm["ptx"]] for m in (*first, *more)
]))
"""
CASES = [
    (128, 4, 32, None, "bfloat16", None),
    (128, 4, 32, 16, "bfloat16", None),
    (128, 7, 18, None, "float16", 30.0),
    (128, 4, 8, None, "bfloat16", None),  # every fourth row of a tile
    (64, 8, 16, 64, "bfloat16", None),
    (256, 8, 16, None, "bfloat16", None),
    (128, 1, 128, None, "bfloat16", None),
    (72, 3, 5, 3, "float32", 30.0),
    (128, 4, 32, None, "float32", None),
    (128, 1, 1, None, "bfloat16", None),
]


@pytest.mark.parametrize(("case",), swept([(case,) for case in CASES], 3))
def test_compiles_for_an_h200(case: tuple[object, ...]) -> None:
    kernels = printed(COMPILE, json.dumps(case))
    assert [name for name, *_ in kernels] == ["attend_tiles", "log_sums", "log_sums", "score"]
    assert all(shared <= SHARED_MEMORY and cubin for _, shared, cubin, *_ in kernels), kernels
    if case[0] == 128 and case[4] != "float32" and case[2] * case[1] >= 96:  # type: ignore[operator]
        assert all(tensor_cores and ahead for *_, tensor_cores, ahead in kernels), kernels
