"""Which methods are measured beside each other."""

from __future__ import annotations

import pytest

from longreach.errors import InvalidInput, UnknownName
from longreach.evals.plans import plans
from longreach.methods.registry import METHODS, names


def test_every_method_is_measured_in_every_slot_it_fills_and_dense_first() -> None:
    found = plans()
    assert found[0][0] == "dense" and found[0][1] == names("decode") and found[0][1][0] == "dense"
    assert {prefill for prefill, _ in found} == set(names("prefill"))
    assert {d for _, decodes in found for d in decodes} | {p for p, _ in found} == set(METHODS)


def test_chosen_methods_are_measured_against_dense() -> None:
    assert plans(["oracle_top_k"]) == [("dense", ("dense", "oracle_top_k"))]
    assert plans(["streaming_llm"]) == [("dense", ("dense", "streaming_llm")), ("streaming_llm", ("streaming_llm",))]
    assert plans(["dense"]) == [("dense", ("dense",))]


def test_methods_are_left_out_unless_they_are_chosen() -> None:
    found = plans(left_out={"oracle_top_k", "streaming_llm"})
    decodes = tuple(n for n in names("decode") if n not in ("oracle_top_k", "streaming_llm"))
    assert found[0] == ("dense", decodes) and "streaming_llm" not in {prefill for prefill, _ in found}
    assert plans(["oracle_top_k"], left_out={"oracle_top_k"}) == [("dense", ("dense", "oracle_top_k"))]


def test_unknown_and_no_methods_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown method 'quset'; known: dense, streaming_llm"):
        plans(["dense", "quset"])
    with pytest.raises(InvalidInput, match="name some of dense"):
        plans([])
