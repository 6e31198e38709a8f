"""Methods as command lines name them."""

from __future__ import annotations

import re

import pytest

from longreach import A3, Dense, OracleTopK, Quest, SnapKV, StreamingLLM
from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.evals.methods import Spec, by_prefill, by_reading, pairings, parse, refuse_slots, specs
from longreach.methods.fusion import PIE
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
        (
            "quest k=8  evict=snapkv evict.capacity=512",
            Spec("quest k=8 evict=snapkv evict.capacity=512", Dense(), Quest(k=8), None, SnapKV(capacity=512)),
        ),
        (
            "dense fuse.ratio=0.3 fuse=a3 fuse.heads=joint evict=snapkv",
            Spec(
                "dense fuse.ratio=0.3 fuse=a3 fuse.heads=joint evict=snapkv",
                Dense(),
                Dense(),
                A3(ratio=0.3, heads="joint"),
                SnapKV(),
            ),
        ),
        ("dense fuse=none", Spec("dense fuse=none", Dense(), Dense())),
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
        ("dense fuse=a4", UnknownName, "unknown fuse method 'a4'; known: none, full_reuse, pie"),
        ("dense evict=h2o", UnknownName, "unknown evict method 'h2o'; known: none, snapkv"),
        ("dense fuse=a3 fuse.ration=1", UnknownName, "option of a3 'ration'; known: ratio, heads"),
        ("dense evict=snapkv evict.ratio=1", UnknownName, "option of snapkv 'ratio'; known: window, capacity"),
        ("dense fuse=a3 fuse.ratio=2", InvalidInput, "number in [0, 1], got 2"),
        ("dense fuse.ratio=0.3", InvalidInput, "fuse.ratio: an option of a method, and the fuse slot has none"),
        ("dense fuse=a3 fuse=pie", InvalidInput, "expected fuse=NAME once"),
        ("dense evict=", InvalidInput, "expected evict=NAME once"),
        ("streaming_llm/dense fuse=a3", Unsupported, "fuse=a3 with prefill=streaming_llm: recomputed tokens attend"),
        ("mac evict=snapkv", Unsupported, "evict=snapkv with decode=mac"),
        ("kascade fuse=a3 evict=snapkv", Unsupported, "evict=snapkv with decode=kascade"),
        ("dense evict=snapkv evict.capacity=8", InvalidInput, "snapkv: capacity 8 is less"),
    ],
)
def test_what_is_no_method_is_refused_in_words(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        parse(text)


def test_dense_comes_first_and_prefills_are_shared() -> None:
    chosen = specs(["streaming_llm", "streaming_llm/streaming_llm", "oracle_top_k", "dense", "streaming_llm"])
    assert [s.label for s in chosen] == ["dense", "streaming_llm", "streaming_llm/streaming_llm", "oracle_top_k"]
    groups = by_prefill(chosen)
    assert [(p.name, [s.label for s in g]) for p, g in groups] == [
        ("dense", ["dense", "streaming_llm", "oracle_top_k"]),
        ("streaming_llm", ["streaming_llm/streaming_llm"]),
    ]


def test_settings_go_to_the_methods_that_have_the_option_and_do_not_set_it() -> None:
    texts = ["dense fuse=a3", "dense fuse=pie", "dense fuse=a3 fuse.ratio=0.3", "dense evict=snapkv"]
    given = {"fuse": {"ratio": 0.05, "heads": "joint"}, "evict": {"capacity": 99}}
    assert [s.label for s in specs(texts, settings=given)] == [
        "dense", "dense fuse=a3 fuse.ratio=0.05 fuse.heads=joint", "dense fuse=pie",
        "dense fuse=a3 fuse.ratio=0.3 fuse.heads=joint", "dense evict=snapkv evict.capacity=99",
    ]  # fmt: skip
    for wrong in ({"fuse": {"rato": 1}}, {"evict": {"ratio": 1}}):
        with pytest.raises(InvalidInput, match="no method given has this option"):
            specs(["dense fuse=a3", "dense evict=snapkv"], settings=wrong)


def test_controls_are_known_only_where_they_are_given() -> None:
    assert parse("dense fuse=again", {"again": PIE}).fuse == PIE()
    with pytest.raises(UnknownName, match="dependence, again"):
        parse("dense fuse=x", {"again": PIE})


def test_fused_prompts_are_one_group_and_eviction_parts_the_others() -> None:
    texts = ["quest", "dense evict=snapkv", "dense fuse=a3", "quest evict=snapkv", "dense fuse=pie evict=snapkv"]
    plain, fused = [["dense", "quest"], ["dense evict=snapkv", "quest evict=snapkv"]], [*texts[2::2]]
    for together, rest in ((True, [fused]), (False, [[label] for label in fused])):
        found = by_reading(specs(texts), fused_together=together)
        assert [[s.label for s in group] for group in found] == [*plain, *rest]
    with pytest.raises(InvalidInput, match="'dense evict=snapkv': evict=snapkv: no eviction here"):
        refuse_slots(specs(texts), ("evict",), "no eviction here")


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
