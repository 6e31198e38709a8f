"""Methods as text, options behind the name."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.errors import InvalidInput, LongreachError, UnknownName
from longreach.methods.dense import Dense
from longreach.methods.fusion import A3
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.registry import choose, choose_eviction, choose_fusion
from longreach.methods.snapkv import SnapKV
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
    assert choose("decode", text) == method


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
        (StreamingLLM, r"got the class StreamingLLM.*write StreamingLLM\(\) or decode=\"streaming_llm\""),
    ],
)
def test_bad_methods_are_refused(text: Any, complaint: str) -> None:
    with pytest.raises(LongreachError, match=complaint):
        choose("decode", text)


def test_text_and_options_together() -> None:
    assert choose("decode", "streaming_llm window=8", sinks=1) == StreamingLLM(window=8, sinks=1)
    with pytest.raises(InvalidInput, match="decode: window is set in the method's text and as an option"):
        choose("decode", "streaming_llm window=8", window=9)


def test_the_other_slots_take_the_same_text() -> None:
    assert choose_fusion("a3 ratio=0.3") == A3(ratio=0.3)
    assert choose_eviction("snapkv capacity=64 window=8") == SnapKV(capacity=64, window=8)
    with pytest.raises(InvalidInput, match=r"fuse: got the class A3.*write A3\(\) or fuse=\"a3\""):
        choose_fusion(A3)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="unknown option of a3 'k'"):
        choose_fusion("a3 k=3")
    with pytest.raises(InvalidInput, match="evict: ratio is set in the method's text and as an option"):
        choose_eviction("snapkv ratio=1", ratio=2)
