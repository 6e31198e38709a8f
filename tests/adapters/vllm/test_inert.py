"""Engines that do not ask for longreach are vLLM's own; several engines of one process; a plug-in loaded twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longreach
from longreach.errors import InvalidInput
from tests.adapters.vllm.engines import answers, engine, expected, prompts
from tests.adapters.vllm.plain import probabilities

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[3]


def test_without_the_key_vllm_is_as_it_is() -> None:
    """Log-probabilities to the bit, of this engine and one of a process that loads no plug-in."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    ids = prompts(900, 300)
    command = [sys.executable, "-m", "tests.adapters.vllm.plain", json.dumps(ids)]
    alone = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "VLLM_PLUGINS": ""}
    )
    assert alone.returncode == 0, alone.stderr[-3000:]
    longreach.vllm.register()
    longreach.vllm.register()
    with engine(None) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {type(layer.impl) for layer in layers} == {CPUAttentionBackendImpl}
        found = probabilities(llm, ids)
        with pytest.raises(InvalidInput, match="does not use longreach"):
            longreach.vllm.report(llm)
    assert json.loads(alone.stdout.splitlines()[-1]) == [[list(pair) for pair in one] for one in found]


def test_engines_of_one_process_do_not_affect_each_other() -> None:
    ids = prompts(900, 300)
    with engine("streaming_llm window=128") as first, engine("quest dense_layers=[0]") as second:
        assert answers(first, ids) == expected("streaming_llm window=128", ids)
        assert answers(second, ids) == expected("quest dense_layers=[0]", ids)
        assert answers(first, ids) == expected("streaming_llm window=128", ids)
        reports = longreach.vllm.report(first), longreach.vllm.report(second)
    methods = [{layer.method for layer in report.layers if layer.phase == "decode"} for report in reports]
    assert methods == [{"streaming_llm"}, {"quest"}]


def test_a_report_needs_an_engine() -> None:
    with pytest.raises(InvalidInput, match=r"llm: expected a vllm\.LLM, got str"):
        longreach.vllm.report("an engine")

    class Served:
        async def collective_rpc(self, name: str) -> None: ...

    with pytest.raises(InvalidInput, match=r"llm: expected a vllm.LLM, got Served"):
        longreach.vllm.report(Served())
