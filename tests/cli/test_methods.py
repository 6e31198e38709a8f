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


def test_options_of_one_method_are_explained(longreach: Any) -> None:
    result = longreach("methods", "quest")
    assert result.code == 0 and result.out.startswith("quest (decode): Attention to the blocks of keys")
    assert all(name in result.out for name in ("dense_layers", "(0, 1)", "keys in a block"))
    assert "It has no options." in longreach("methods", "dense").out
    found = json.loads(longreach("methods", "a3", "--json").out)
    assert found["slots"] == ["fuse"] and [option["name"] for option in found["options"]] == ["ratio", "heads"]
    assert all(option["meaning"] for option in found["options"])


def test_an_unknown_method_is_refused(longreach: Any) -> None:
    result = longreach("methods", "quets")
    assert result.code == 2 and "unknown method 'quets'; known: full_reuse" in result.err
