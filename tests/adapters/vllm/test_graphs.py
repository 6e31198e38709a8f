"""Steps that replay a CUDA graph, played on a CPU.

As vLLM does on a GPU, steps of several sizes are captured over dummy batches. A later step with one row a request is
padded to one of these sizes, and its layers run again over the tensors of the capture, whose contents the builder has
changed. Nothing of the step's own metadata reaches them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import longreach
from tests.adapters.vllm import engines
from tests.adapters.vllm.engines import answers, engine, expected, prompts

pytestmark = pytest.mark.vllm
SIZES = (8, 4, 2)


class Recorder:
    """Captures and replays the steps of one engine. forward, build: the implementation's and the builder's own."""

    def __init__(self, forward: Callable[..., Tensor], build: Callable[..., Any]):
        self.forward, self.build = forward, build
        self.steps: dict[int, Any] = {}  # rows -> metadata of the capture
        self.inputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (rows, layer) -> its query and output
        self.capturing, self.replays = False, 0

    def capture(self, builder: Any, batch: Any) -> None:
        """All sizes, each run once before it is captured."""
        engine = builder.engine
        engine.graphs = True
        for n in SIZES:
            dummy = padded(batch, n, real=0)
            for self.capturing in (False, True):
                self.steps[n] = self.build(builder, 0, dummy)
                for number, layer in engine.layers.items():
                    impl = layer.module.impl
                    shape = (n, impl.num_heads, impl.head_size)
                    query, out = self.inputs.setdefault((n, number), (torch.randn(shape), torch.empty(shape)))
                    self.forward(impl, layer.module, query, None, None, layer.module.kv_cache, self.steps[n], out)
        self.capturing = False

    def run(self, impl: Any, layer: Any, query: Tensor, rest: tuple[Any, ...], metadata: Any, output: Tensor) -> Tensor:
        number = impl._number(layer)
        if metadata is None or not metadata.step.rows:
            return self.forward(impl, layer, query, *rest, metadata, output)
        captured, rows = self.steps[metadata.step.rows], query.shape[0]
        if number == 0:
            captured.step.decode.restart()
            self.replays += 1
        mine, out = self.inputs[metadata.step.rows, number]
        mine[:rows].copy_(query)
        self.forward(impl, layer, mine, *rest, captured, out)
        return output.copy_(out[:rows])


def padded(batch: Any, n: int, real: int) -> Any:
    """A batch of one row a request, padded to n requests; rows without a place in the cache hold anything."""
    missing = n - real
    starts = torch.cat([torch.arange(real + 1), torch.full((missing,), real)]).int()

    def more(x: Tensor, value: int) -> Tensor:
        return torch.cat([x[:real], torch.full((missing, *x.shape[1:]), value, dtype=x.dtype)])

    return batch.replace(
        num_reqs=n, num_actual_tokens=n, max_query_len=1, query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=more(batch.seq_lens, 1 if real == 0 else 0), slot_mapping=more(batch.slot_mapping, -1),
        seq_lens_cpu_upper_bound=more(batch.seq_lens_cpu_upper_bound, 0),
        block_table_tensor=more(batch.block_table_tensor, 3), is_prefilling=batch.is_prefilling[:real], positions=None,
    )  # fmt: skip


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from longreach.adapters.vllm.cpu import CPUBuilder, CPUImpl

    found = Recorder(CPUImpl.forward, CPUBuilder.build)

    def build(builder: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        batch = common_attn_metadata
        if not found.steps:
            found.capture(builder, batch)
        if batch.max_query_len == 1:
            batch = padded(batch, min(n for n in SIZES if n >= batch.num_reqs), batch.num_reqs)
        return found.build(builder, common_prefix_len, batch, fast_build)

    def forward(impl: Any, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, metadata: Any, output: Tensor,
                **scales: Any) -> Tensor:  # fmt: skip
        return found.run(impl, layer, query, (key, value, cache), metadata, output)

    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: found.capturing)
    monkeypatch.setattr(CPUBuilder, "build", build)
    monkeypatch.setattr(CPUImpl, "forward", forward)
    monkeypatch.setattr("longreach.adapters.vllm.engine.cuda", cuda)
    return found


@pytest.mark.parametrize("decode", ["dense", "streaming_llm", "kascade", "kascade scoring=int8", "omnikv",
                                    "less_is_more", "quest dense_layers=[0]", "loki"])  # fmt: skip
def test_replayed_steps_answer_and_count_as_others(decode: str, recorder: Recorder) -> None:
    """Batches of 3 requests and of 1, over steps of 4 and of 2."""
    ids = prompts(2000, 300, 900)
    with engine(decode) as llm:
        assert answers(llm, ids) == expected(decode, ids)
        assert answers(llm, ids[:1]) == expected(decode, ids[:1])
        report = longreach.vllm.report(llm)
    assert recorder.replays == 2 * (engines.NEW - 1)
    rows = (len(ids) + 1) * (engines.NEW - 1)
    decoded = [layer for layer in report.layers if layer.phase == "decode"]
    assert [layer.rows for layer in decoded] == [rows] * 12
    assert [layer.steps for layer in decoded] == [2 * (engines.NEW - 1)] * 12
    lengths = [np.arange(len(one) + 1, len(one) + engines.NEW).sum() for one in (*ids, ids[0])]
    config = json.loads((engines.MINI / "config.json").read_text())
    slot = 2 * config["num_key_value_heads"] * config["head_dim"] * 4  # bytes of a key and a value in fp32
    assert [layer.dense_bytes for layer in decoded] == [slot * int(sum(lengths))] * 12
    share = report.fraction("decode")
    assert share is not None and (share == 1.0 if decode == "dense" else share < 0.5)
