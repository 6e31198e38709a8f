"""Engines on a GPU: both model runners, their CUDA graphs, and FlashAttention for prompts.

In bf16 two ways to add numbers choose different tokens where two have nearly the same logit, so answers are compared up
to the first difference.
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
    "kv_cache_memory_bytes": 4 << 30,  # without it vLLM refuses to start where another process frees GPU memory
}  # fmt: skip
SAME_TOKENS = 0.75  # the least share of tokens before the first difference, on average over the requests
SAME_TOKENS_MAC = 0.5  # for mac: it reuses rows whose similarity passes a threshold, which rounding can change
SAME_TOKENS_EACH = 0.2  # the least share of each request but one


@functools.cache
def _model() -> Any:
    return longreach.load("mini", dtype=torch.bfloat16, device="cuda")[0]


@functools.cache
def _answer(decode: str, ids: tuple[int, ...], new: int) -> list[int]:
    """longreach.generate's greedy answer."""
    prompt = torch.tensor([ids], device="cuda")
    made = longreach.generate(_model(), prompt, max_new_tokens=new, decode=decode, eos_token_id=())
    return list(made.tokens[0].tolist())


def leading(asked: list[list[int]], found: list[list[int]], decode: str) -> list[float]:
    """For each request: the share of its tokens before the first that differs from longreach.generate's."""
    shares = []
    for ids, mine in zip(asked, found, strict=True):
        pairs = zip(mine, _answer(decode, tuple(ids), len(mine)), strict=True)
        shares.append(next((n for n, (a, b) in enumerate(pairs) if a != b), len(mine)) / len(mine))
    return shares


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that replayed a CUDA graph."""
    from longreach.adapters.vllm.engine import Engine

    plain, found = Engine.settle, list[int]()

    def settle(self: Engine) -> None:
        step = self._step
        if step is not None and step.counted and not step.ran:
            found.append(step.rows)
        plain(self)

    monkeypatch.setattr(Engine, "settle", settle)
    return found


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
def test_answers_and_reads(decode: str, more: dict[str, Any], replayed: list[int]) -> None:
    """All prompts twice, then six and three of them, whose steps replay graphs of eight and four requests."""
    ids, least = ragged(), SAME_TOKENS
    if decode == MAC:
        least = SAME_TOKENS_MAC
    with engine(decode, **OPTIONS | more) as llm:
        assert not longreach.vllm.report(llm).layers, "vLLM's warm-up is not counted"
        replayed.clear()
        found = answers(llm, ids)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        again = answers(llm, ids)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
        report = longreach.vllm.report(llm)
        graphs = list(replayed)
        fewer = {count: answers(llm, ids[:count]) for count in (6, 3)}
    for asked, given in ((ids, found), (ids, again), *((ids[:count], fewer[count]) for count in fewer)):
        shares = leading(asked, given, decode)
        assert sum(shares) >= least * len(shares) and sorted(shares)[1] >= SAME_TOKENS_EACH, shares
    if more.get("enforce_eager"):
        assert not replayed
    else:
        # with pieces of 256 tokens the requests begin to decode one after another
        assert graphs.count(8) >= (2 if more else 2 * (engines.NEW - 2)) and set(replayed) <= {1, 4, 8}
        assert replayed[len(graphs) :].count(8) and replayed[len(graphs) :].count(4)
    decoded = [layer for layer in report.layers if layer.phase == "decode"]
    (rows,) = {layer.rows for layer in decoded}
    expected = 2 * len(ids) * (engines.NEW - 1)
    # a piece of one token of a prompt is one more, where all requests of its step have one
    assert expected <= rows <= expected + 2 * len(ids) * bool(more.get("enable_prefix_caching"))
    assert decode != MAC or any(layer.notes is not None and max(layer.notes["reuse"]) > 0 for layer in decoded)
    share = report.fraction("decode")
    assert share is not None and (share == 1.0 if decode == "dense" else 0.05 < share < (1.0 if decode == MAC else 0.5))


@pytest.mark.parametrize("decode", ["kascade", "quest dense_layers=[0]"])
def test_model_runner_v1(decode: str, replayed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    ids = ragged()
    with engine(decode, **OPTIONS) as llm:
        assert not llm.llm_engine.vllm_config.use_v2_model_runner
        replayed.clear()
        found = answers(llm, ids)
        report = longreach.vllm.report(llm)
    envs.disable_envs_cache()
    shares = leading(ids, found, decode)
    assert sum(shares) >= SAME_TOKENS * len(shares) and sorted(shares)[1] >= SAME_TOKENS_EACH, shares
    assert replayed.count(8) >= engines.NEW - 2
    assert {layer.rows for layer in report.layers if layer.phase == "decode"} == {len(ids) * (engines.NEW - 1)}


@pytest.mark.parametrize("decode", ["dense", "kascade", "kascade scoring=int8", "quest dense_layers=[0]", "loki"])
def test_steps_that_read_prompts_compile_no_kernel(decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive one after another, so that steps read a prompt while one to seven requests decode.

    Before, the prompts alone are read: kernels that only read prompts are compiled then.
    """
    from triton import knobs
    from vllm import SamplingParams

    from longreach.adapters.vllm.rows import DecodeBuffers

    compiled, counts, fill = list[str](), set[int](), DecodeBuffers.fill

    def note_kernel(*, fn: Any, **facts: Any) -> None:
        compiled.append(f"{fn.module}.{fn.name}")

    def note_count(self: DecodeBuffers, batch: Any, split: Any, slots: Any, size: int) -> Any:
        if len(split.prompt):
            counts.add(len(split.decode))
        return fill(self, batch, split, slots, size)

    greedy = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with engine(decode, **OPTIONS | {"max_num_batched_tokens": 256}) as llm:
        for ids in ragged():
            answers(llm, [ids], 2)
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note_kernel)
        monkeypatch.setattr(DecodeBuffers, "fill", note_count)
        core = llm.llm_engine
        for number, ids in enumerate(ragged()):
            core.add_request(str(number), {"prompt_token_ids": ids}, greedy)
            for _ in range(12):
                core.step()
        while core.has_unfinished_requests():
            core.step()
    assert counts >= set(range(1, 8))
    assert not [name for name in compiled if name.startswith("longreach")]
