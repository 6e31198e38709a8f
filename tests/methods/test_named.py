"""Methods as text, options behind the name."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.errors import LongreachError
from longreach.methods.dense import Dense
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.registry import named
from longreach.methods.streaming_llm import StreamingLLM


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (None, Dense()),
        ("dense", Dense()),
        ("oracle_top_k k=0.1 dense_layers=[0,1] heads=all", OracleTopK(k=0.1, dense_layers=(0, 1), heads="all")),
        ("streaming_llm  window=8", StreamingLLM(window=8)),
        (StreamingLLM(sinks=1), StreamingLLM(sinks=1)),
    ],
)
def test_methods_are_read_as_the_command_line_reads_them(text: Any, method: Any) -> None:
    assert named("decode", text) == method


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected NAME"),
        ("streaming_llm 'window=8", "expected NAME"),
        ("streaming_llm window", "'window' is no option=value"),
        ("streaming_llm window=8 window=9", "window is set twice"),
        ("quets", "unknown decode method 'quets'; known: dense"),
        ("streaming_llm k=3", "unknown option of streaming_llm 'k'"),
        ("oracle_top_k k=many", "k: expected"),
    ],
)
def test_bad_methods_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(LongreachError, match=complaint):
        named("decode", text)
