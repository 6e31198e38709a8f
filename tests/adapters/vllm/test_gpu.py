"""Engines on a GPU: model runner V2, its CUDA graphs, and FlashAttention for prompts.

In bf16 two ways to add numbers choose different tokens where two are nearly alike, so answers are compared up to the
first difference.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import longreach
from tests.adapters.vllm import engines
from tests.adapters.vllm.engines import answers, engine, ragged

pytestmark = [
    pytest.mark.vllm, pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip
MAC = "mac tau=0.3 window=64 band=32 min_context=0 rest_rows=null"
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "enforce_eager": False, "attention_backend": "CUSTOM", "gpu_memory_utilization": 0.3,
    "compilation_config": {"cudagraph_capture_sizes": [1, 4, 8]}, "block_size": 16,
}  # fmt: skip
ALIKE = 0.75  # of the tokens, at least, come before the first difference


@functools.cache
def _model() -> Any:
    return longreach.load("mini", dtype=torch.bfloat16, device="cuda")[0]


def leading(found: list[list[int]], decode: str) -> float:
    """Share of tokens before the first one that differs from longreach.generate's."""
    same = 0
    for ids, mine in zip(ragged(), found, strict=True):
        made = longreach.generate(
            _model(), torch.tensor([ids], device="cuda"), max_new_tokens=len(mine), decode=decode, eos_token_id=()
        )
        pairs = zip(mine, made.tokens[0].tolist(), strict=True)
        same += next((n for n, (a, b) in enumerate(pairs) if a != b), len(mine))
    return same / sum(len(each) for each in found)


@pytest.mark.parametrize(
    ("decode", "more"),
    [
        ("dense", {}),
        ("kascade", {}),
        ("kascade", {"enforce_eager": True}),
        ("quest dense_layers=[0]", {"enable_prefix_caching": True, "max_num_batched_tokens": 256}),
        ("streaming_llm window=128", {}),
        (MAC, {}),
    ],
    ids=["dense", "kascade", "eager", "quest", "streaming_llm", "mac"],
)
def test_answers_and_reads(decode: str, more: dict[str, Any]) -> None:
    ids = ragged()
    with engine(decode, **OPTIONS | more) as llm:
        assert not longreach.vllm.report(llm).layers, "vLLM's warm-up is not counted"
        found = answers(llm, ids)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        again = answers(llm, ids)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
        report = longreach.vllm.report(llm)
    assert leading(found, decode) >= ALIKE and leading(again, decode) >= ALIKE
    decoded = [layer for layer in report.layers if layer.phase == "decode"]
    (rows,) = {layer.rows for layer in decoded}
    expected = 2 * len(ids) * (engines.NEW - 1)
    # a piece of one token of a prompt is one more, where all requests of its step have one
    assert expected <= rows <= expected + 2 * len(ids) * bool(more.get("enable_prefix_caching"))
    share = report.fraction("decode")
    assert share is not None and (share == 1.0 if decode == "dense" else 0.05 < share < (1.0 if decode == MAC else 0.5))
