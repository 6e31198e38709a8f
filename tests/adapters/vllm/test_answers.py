"""Greedy answers of an engine are those of longreach.generate with the same method."""

from __future__ import annotations

import numpy as np
import pytest

import longreach
from tests.adapters.vllm import engines
from tests.adapters.vllm.engines import METHODS, answers, engine, expected, outputs, prompts, ragged

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("decode", METHODS)
def test_ragged_prompts_at_once(decode: str) -> None:
    ids = ragged()
    with engine(decode) as llm:
        assert answers(llm, ids) == expected(decode, ids)
        report = longreach.vllm.report(llm)
    rows = sum(len(each) for each in ids)
    for layer in report.layers:
        new = layer.phase == "decode"
        assert layer.rows == (len(ids) * (engines.NEW - 1) if new else rows)
        assert layer.method.split("+")[0] == (decode.split()[0] if new else "dense")
        assert new or layer.impl.startswith("CPU_ATTN")
    assert {layer.phase for layer in report.layers} == {"prefill", "decode"}
    assert len(report.layers) == 2 * 12
    share = report.fraction("decode")
    assert share is not None and (share == 1.0 if decode == "dense" else 0.1 < share < 0.4)


@pytest.mark.parametrize("decode", ["kascade", "quest dense_layers=[0]", "less_is_more"])
def test_padded_steps(decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs decoding rows are padded to the sizes of captured steps, in steps that read prompts too."""
    from longreach.adapters.vllm.engine import Engine

    counts = set[int]()

    def padded(self: Engine, requests: int) -> int:
        counts.add(requests)
        return -(-requests // 4) * 4

    monkeypatch.setattr(Engine, "padded", padded)
    ids = ragged()
    with engine(decode, max_num_batched_tokens=256, enable_chunked_prefill=True) as llm:
        assert answers(llm, ids) == expected(decode, ids)
        report = longreach.vllm.report(llm)
    assert counts >= {1, 8} and len(counts) > 4
    slot = 2 * 4 * 64 * 4  # bytes of a key and a value of longreach-mini in fp32
    lengths = [np.arange(len(one) + 1, len(one) + engines.NEW).sum() for one in ids]
    for layer in report.layers:
        new = layer.phase == "decode"
        assert layer.rows == (len(ids) * (engines.NEW - 1) if new else sum(map(len, ids)))
        assert not new or layer.dense_bytes == slot * int(sum(lengths))


def test_the_method_is_really_used() -> None:
    """A narrow window changes answers, in vLLM as in longreach.generate."""
    ids = ragged()
    assert expected("streaming_llm window=128", ids) != expected("dense", ids)


@pytest.mark.parametrize("decode", ["kascade", "kascade scoring=int8", "quest dense_layers=[0]", "loki"])
def test_chunked_prompts_and_cached_prefixes(decode: str) -> None:
    """Prompts in chunks of 256, asked twice; then two that share their beginning with a third, at once."""
    ids = prompts(3000, 1500, 700)
    shared = [ids[0][:600] + ids[1][-100:], ids[0][:600] + ids[2][-60:], ids[0][:600] + ids[1][20:60]]
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    with engine(decode, **options) as llm:
        first = answers(llm, ids)
        again = outputs(llm, ids)
        both = outputs(llm, shared)
    assert first == expected(decode, ids)
    assert [list(one.outputs[0].token_ids) for one in again] == first
    assert all(one.num_cached_tokens > 0 for one in again)
    assert [list(one.outputs[0].token_ids) for one in both] == expected(decode, shared)
    assert all(one.num_cached_tokens >= 576 for one in both)


@pytest.mark.parametrize("decode", ["quest dense_layers=[0]", "kascade", "streaming_llm window=128"])
def test_a_preempted_request(decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer until then is read again as part of the prompt, and the rest is that of such a prompt."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, plain = dict[str, int](), Scheduler._preempt_request

    def note(self: Scheduler, request: object, *args: object, **more: object) -> None:
        preempted[request.request_id.split("-")[0]] = request.num_output_tokens  # type: ignore[attr-defined]
        plain(self, request, *args, **more)

    monkeypatch.setattr(Scheduler, "_preempt_request", note)
    ids = [each[:480] for each in prompts(3000, 3000, 3000, 3000)]
    with engine(decode, num_gpu_blocks_override=63, max_model_len=1024) as llm:
        found = outputs(llm, ids, 48)
    assert preempted and preempted.keys() <= {one.request_id for one in found}
    for one, prompt in zip(found, ids, strict=True):
        answer, n = list(one.outputs[0].token_ids), preempted.get(one.request_id, 0)
        assert answer[:n] == expected(decode, [prompt], 48)[0][:n]
        assert answer[n:] == expected(decode, [prompt + answer[:n]], 48 - n)[0]


def test_as_many_tokens_as_the_model_allows() -> None:
    """A request that ends at max_model_len, and state in the last page."""
    (ids,) = prompts(1500)
    room = len(ids) + 10
    with engine("quest dense_layers=[0]", max_model_len=room) as llm:
        assert answers(llm, [ids]) == [expected("quest dense_layers=[0]", [ids])[0][:10]]
