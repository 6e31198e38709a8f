"""Names, and what they stand for."""

from __future__ import annotations

from typing import Any

import pytest

import longreach
from longreach.errors import InvalidInput, UnknownName
from longreach.methods.dense import Dense
from longreach.methods.oracle_top_k import OracleTopK
from longreach.methods.registry import METHODS, choose, from_json, method_class, names
from longreach.methods.streaming_llm import StreamingLLM


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_called_what_it_is_registered_as(name: str) -> None:
    kind = method_class(name)
    assert kind.name == name and kind.phases and set(kind.phases) <= {"prefill", "decode"}
    assert METHODS[name] == f"longreach.methods.{name}:{kind.__name__}"
    assert getattr(longreach, kind.__name__) is kind
    assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__ + "(")  # not the one dataclasses write


def test_names() -> None:
    assert names() == tuple(METHODS)
    assert names("prefill") == ("dense", "streaming_llm", "kascade", "block_mka")
    assert names("decode") == tuple(METHODS)


def test_choosing() -> None:
    assert choose("decode", None) == choose("decode", "dense") == Dense()
    assert choose("decode", "streaming_llm", window=7) == StreamingLLM(window=7)
    method = OracleTopK(k=3)
    assert choose("decode", method) is method


@pytest.mark.parametrize(
    ("phase", "method", "options", "error", "message"),
    [
        ("decode", "stream", {}, UnknownName, "unknown decode method 'stream'; known: dense, streaming_llm, oracle"),
        ("prefill", "oracle_top_k", {}, UnknownName, "unknown prefill method 'oracle_top_k'; known: dense, streaming"),
        ("prefill", OracleTopK(), {}, UnknownName, "unknown prefill method 'oracle_top_k'; known: dense, streaming"),
        ("decode", "streaming_llm", {"size": 3}, UnknownName, "streaming_llm 'size'; known: sinks, window"),
        ("decode", "dense", {"k": 3}, UnknownName, "unknown option of dense 'k'; known: none"),
        ("decode", None, {"k": 3}, UnknownName, "unknown option of dense 'k'; known: none"),
        ("decode", Dense(), {"k": 3}, InvalidInput, "options with a method's name, or a configured method, not both"),
        ("decode", Dense, {}, InvalidInput, "got the class Dense"),
        ("decode", 3, {}, InvalidInput, "decode: expected a configured method of this slot or its name, got 3"),
        ("decode", "streaming_llm", {"window": "wide"}, InvalidInput, "window: expected a count"),
    ],
)
def test_what_cannot_be_chosen(phase: Any, method: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        choose(phase, method, **options)


def test_unknown_class() -> None:
    with pytest.raises(UnknownName, match="unknown method 'quests'; known: dense"):
        method_class("quests")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("{", InvalidInput, "expected a JSON object, got '{'"),
        ("[1]", InvalidInput, 'expected an object with a "name", got'),
        ("{}", InvalidInput, 'expected an object with a "name"'),
        ({"name": None}, InvalidInput, 'expected an object with a "name"'),
        ({"name": "quests"}, UnknownName, "unknown method 'quests'"),
        ({"name": "dense", "k": 1}, UnknownName, "unknown option of dense 'k'"),
        ('{"name": "oracle_top_k", "k": 0}', InvalidInput, "k: expected"),
    ],
)
def test_configurations_that_cannot_be_read(config: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        from_json(config)


def test_reading_leaves_the_configuration_alone() -> None:
    config = {"name": "streaming_llm", "window": 0.5}
    assert from_json(config) == StreamingLLM(window=0.5) and config == {"name": "streaming_llm", "window": 0.5}
