"""Methods as command lines name them."""

from __future__ import annotations

import pytest

from longreach import Dense, OracleTopK, StreamingLLM
from longreach.errors import InvalidInput, UnknownName
from longreach.evals.methods import Spec, by_prefill, pairings, parse, specs
from longreach.methods.registry import METHODS, names


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("dense", Spec("dense", Dense(), Dense())),
        ("  oracle_top_k   k=0.025", Spec("oracle_top_k k=0.025", Dense(), OracleTopK(0.025))),
        (
            "oracle_top_k dense_layers=[0,1] heads=all",
            Spec("oracle_top_k dense_layers=[0,1] heads=all", Dense(), OracleTopK(dense_layers=(0, 1), heads="all")),
        ),
        (
            "streaming_llm/dense prefill.window=9",
            Spec("streaming_llm/dense prefill.window=9", StreamingLLM(window=9), Dense()),
        ),
    ],
)
def test_specs(text: str, spec: Spec) -> None:
    assert parse(text) == spec
    assert spec.to_json()["decode"]["name"] == spec.decode.name


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", InvalidInput, "expected"),
        ("'oracle", InvalidInput, "expected"),
        ("oracle_top_k k", InvalidInput, "'k' is no option=value"),
        ("oracle_top_k k=", InvalidInput, "is no option=value"),
        ("oracle_top_k k=1 k=2", InvalidInput, "k is set twice"),
        ("oracle_top_k dense_layers=[0", InvalidInput, "no JSON value"),
        ("oracle_top_k x=1", UnknownName, "dense_layers"),
        ("nothing", UnknownName, "streaming_llm"),
        ("oracle_top_k/dense", UnknownName, "prefill method"),
        ("dense prefill.k=3", UnknownName, "option of dense"),
    ],
)
def test_what_is_no_method_is_refused_in_words(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("[", r"\[")):
        parse(text)


def test_dense_comes_first_and_prefills_are_shared() -> None:
    chosen = specs(["streaming_llm", "streaming_llm/streaming_llm", "oracle_top_k", "dense", "streaming_llm"])
    assert [s.label for s in chosen] == ["dense", "streaming_llm", "streaming_llm/streaming_llm", "oracle_top_k"]
    groups = by_prefill(chosen)
    assert [(p.name, [s.label for s in g]) for p, g in groups] == [
        ("dense", ["dense", "streaming_llm", "oracle_top_k"]),
        ("streaming_llm", ["streaming_llm/streaming_llm"]),
    ]


def test_every_method_is_measured_in_every_slot_it_fills_and_dense_first() -> None:
    found = pairings()
    assert found[0][0] == "dense" and found[0][1] == names("decode") and found[0][1][0] == "dense"
    assert {prefill for prefill, _ in found} == set(names("prefill"))
    assert {d for _, decodes in found for d in decodes} | {p for p, _ in found} == set(METHODS)


def test_chosen_methods_are_measured_against_dense() -> None:
    assert pairings(["oracle_top_k"]) == [("dense", ("dense", "oracle_top_k"))]
    assert pairings(["streaming_llm"]) == [("dense", ("dense", "streaming_llm")), ("streaming_llm", ("streaming_llm",))]
    assert pairings(["dense"]) == [("dense", ("dense",))]


def test_methods_are_left_out_unless_they_are_chosen() -> None:
    found = pairings(left_out={"oracle_top_k", "streaming_llm"})
    decodes = tuple(n for n in names("decode") if n not in ("oracle_top_k", "streaming_llm"))
    assert found[0] == ("dense", decodes) and "streaming_llm" not in {prefill for prefill, _ in found}
    assert pairings(["oracle_top_k"], left_out={"oracle_top_k"}) == [("dense", ("dense", "oracle_top_k"))]


def test_unknown_and_no_methods_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown method 'quset'; known: dense, streaming_llm"):
        pairings(["dense", "quset"])
    with pytest.raises(InvalidInput, match="name some of dense"):
        pairings([])
