"""`longreach methods`: every registered method, with slots, options and a line of explanation."""

from __future__ import annotations

import json
from typing import Any

from longreach.methods.registry import EVICTIONS, FUSIONS, METHODS
from longreach.methods.streaming_llm import StreamingLLM


def test_the_json_lists_every_method(longreach: Any) -> None:
    found = {m["name"]: m for m in json.loads(longreach("methods", "--json").out)}
    assert list(found) == [*FUSIONS, *METHODS, *EVICTIONS]
    assert found["a3"]["slots"] == ["fuse"] and found["snapkv"]["slots"] == ["evict"]
    assert all(m["slots"] and m["summary"] for m in found.values())
    assert found["streaming_llm"]["slots"] == ["prefill", "decode"]
    assert StreamingLLM(**found["streaming_llm"]["options"]) == StreamingLLM()


def test_the_table_names_methods_and_options(longreach: Any) -> None:
    result = longreach("methods")
    assert result.code == 0
    assert all(name in result.out for name in (*FUSIONS, *METHODS, *EVICTIONS)) and "sinks=4" in result.out
