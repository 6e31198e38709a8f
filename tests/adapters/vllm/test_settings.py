"""longreach's part of an additional config, the versions of vLLM, and the sum of ranks' reports. Without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import longreach
from longreach.adapters.vllm import versions
from longreach.adapters.vllm.reporting import summed
from longreach.adapters.vllm.settings import METHODS, Settings
from longreach.errors import InvalidInput
from longreach.methods.kascade import Kascade
from longreach.methods.registry import method_class
from longreach.runtime import LayerReport


@pytest.mark.parametrize("given", [{}, {"other": 1}, object()])
def test_without_the_key_nothing_is_asked(given: object) -> None:
    assert Settings.of(SimpleNamespace(additional_config=given)) is None


def test_a_method_with_options() -> None:
    given = SimpleNamespace(additional_config={"longreach": {"decode": "kascade k=0.2 heads=all"}})
    assert Settings.of(given) == Settings(Kascade(k=0.2, heads="all"))


def test_methods_are_decode_methods_that_graphs_hold_whole() -> None:
    for name in METHODS:
        method = method_class(name)
        assert "decode" in method.phases and method.capture == "full"


@pytest.mark.parametrize(("version", "name"), [("0.26.0", "0.26"), ("0.32.0+cpu", "0.32"), ("0.29.1", None)])
def test_versions(version: str, name: str | None) -> None:
    assert versions.supported(version) == name


def test_the_sum_of_ranks() -> None:
    one = LayerReport("decode", 0, "quest", "numba", 3, 6, 100, 50, 10, 400, 1, (), None)
    other = replace(one, key_bytes=20, notes={"hits": 2})
    (layer,) = summed([[one], [other]]).layers
    assert (layer.key_bytes, layer.value_bytes, layer.metadata_bytes, layer.dense_bytes) == (120, 100, 20, 800)
    assert (layer.rows, layer.steps, layer.overflowed_lists) == (6, 3, 2)
    assert layer.notes == {"ranks": [None, {"hits": 2}]}
    assert summed([[other]]).layers == (other,)


def test_a_report_of_something_else() -> None:
    with pytest.raises(InvalidInput, match=r"expected a vllm\.LLM, got int"):
        longreach.vllm.report(3)
