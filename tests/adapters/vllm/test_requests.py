"""State of sequences, where an engine tells requests apart. Model runner V2 does, which needs a GPU.

Here the runner for CPUs calls RequestSlots as V2 would, over a ModelState that does nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import longreach
from longreach.errors import InvalidInput
from tests.adapters.vllm.engines import answers, engine, expected, prompts

pytestmark = pytest.mark.vllm
MAC = "mac tau=0.3 window=64 band=32 min_context=0 rest_rows=null"


def test_a_state_class_is_extended_once() -> None:
    from longreach.adapters.vllm.requests import state_class

    model = SimpleNamespace(get_model_state_cls=lambda: PlainState)
    kind = state_class(model)
    assert kind.__name__ == "LongreachPlainState"
    assert state_class(SimpleNamespace(get_model_state_cls=lambda: kind)) is kind


def test_what_vllm_reads_to_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from longreach.adapters.vllm import warm_up

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda self: "times")
    warm_up.install()
    wrapped = Worker.compile_or_warm_up_model
    warm_up.install()
    assert Worker.compile_or_warm_up_model is wrapped
    plain = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"another": 1}))
    assert wrapped(plain) == "times"
    with engine("kascade") as llm:
        answers(llm, prompts(300), 4)
        assert longreach.vllm.report(llm).layers
        worker = SimpleNamespace(vllm_config=llm.llm_engine.vllm_config)
        assert wrapped(worker) == "times" and not longreach.vllm.report(llm).layers
        assert answers(llm, prompts(300), 4) == expected("kascade", prompts(300), 4)
        assert {layer.rows for layer in longreach.vllm.report(llm).layers} == {3, len(prompts(300)[0])}


class PlainState:
    """The calls of vLLM's ModelState that RequestSlots passes on."""

    def __init__(self, *args: Any) -> None:
        pass

    def add_request(self, req_index: int, data: Any) -> None:
        pass

    def prepare_attn(self, input_batch: Any) -> None:
        pass


@pytest.fixture
def told_apart(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Let the runner for CPUs tell requests apart. Returns the slots and requests that have begun."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from longreach.adapters.vllm.requests import RequestSlots

    kind = type("State", (RequestSlots, PlainState), {})
    plain, begun = GPUModelRunner._build_attention_metadata, list[tuple[int, str]]()
    states, slots = dict[int, Any](), dict[int, dict[str, int]]()

    def build(runner: Any, *args: Any, **options: Any) -> Any:
        if id(runner) not in states:
            states[id(runner)], slots[id(runner)] = kind(runner.vllm_config, runner.model), {}
        state, held = states[id(runner)], slots[id(runner)]
        ids = list(runner.input_batch.req_ids)
        for gone in held.keys() - runner.requests.keys():
            del held[gone]
        for one in ids:
            if one not in held:
                held[one] = next(n for n in range(8) if n not in held.values())
                state.add_request(held[one], None)
                begun.append((held[one], one))
        mapping = torch.tensor([held[one] for one in ids], dtype=torch.int32)
        state.prepare_attn(SimpleNamespace(idx_mapping=mapping, num_reqs_after_padding=len(ids)))
        return plain(runner, *args, **options)

    monkeypatch.setattr(GPUModelRunner, "_build_attention_metadata", build)
    monkeypatch.setattr("longreach.adapters.vllm.checks._check_requests", lambda *args: None)
    return begun


def test_mac_answers_as_in_the_loop(told_apart: list[tuple[int, str]]) -> None:
    """Requests of several lengths, and slots that are used again, by other prompts."""
    ids = prompts(2000, 300, 1200, 700, 90, 1500)
    with engine(MAC, max_num_seqs=4, max_num_batched_tokens=1024) as llm:
        assert answers(llm, ids) == expected(MAC, ids)
        assert answers(llm, ids[::-1]) == expected(MAC, ids[::-1])
        report = longreach.vllm.report(llm)
    assert len(told_apart) == 12 and {slot for slot, _ in told_apart} <= {0, 1, 2, 3}
    decode = [layer for layer in report.layers if layer.phase == "decode"]
    assert {layer.method for layer in decode} == {"mac"}
    assert any(layer.notes is not None and max(layer.notes["reuse"]) > 0 for layer in decode)


def test_a_runner_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.adapters.vllm.checks._check_requests", lambda *args: None)
    with engine("mac") as llm, pytest.raises(InvalidInput, match="mac: the model runner has not named the requests"):
        answers(llm, prompts(90), 2)
