"""What docs/kascade says of scores with and without a map between heads, from its record."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from tests.doc_tables import ROOT, Row, record, tables

PAGE = (ROOT / "docs" / "kascade" / "README.md").read_text()
PLAN = "kascade plan=benchmarks/plans/kascade-mini-0-4-8"
LABELS = {
    "dense attention": "dense",
    "mapped heads": f"{PLAN}.json",
    "head of the same number": f"{PLAN}-own.json",
    "all heads pooled": f"{PLAN}.json heads=all",
}


def scores(label: str) -> list[float]:
    return [task["results"][label]["score"] for task in record("mini-kascade-heads-4096")["tasks"].values()]


def shown(label: str) -> Row:
    return (*(f"{score:.1%}" for score in scores(label)), f"{fmean(scores(label)):.1%}")


def test_scores_are_those_of_the_record() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[1:3] == ("multivalue", "multiquery"))
    assert {row[0]: row[1:] for row in rows} == {name: shown(label) for name, label in LABELS.items()}
    lost = fmean(scores(LABELS["mapped heads"])) - fmean(scores(LABELS["head of the same number"]))
    assert f"Without a map {100 * lost:.0f} points of the mean are lost" in PAGE


ANCHORS = {
    "dense attention": "dense",
    "default": f"{PLAN}.json",
    "8-bit scores, 7.9% of the keys": f"{PLAN}.json scoring=int8 k=0.079",
    "the same, `sinks=4 recent=32`": f"{PLAN}.json scoring=int8 k=0.079 sinks=4 recent=32",
    "default, prompt too": f"kascade/{PLAN}.json prefill.{PLAN.removeprefix('kascade ')}.json",
}


def found(label: str, length: int | None = None) -> list[dict[str, Any]]:
    tasks = record("mini-kascade-anchors")["tasks"].values()
    return [task["results"][label] for task in tasks if length in (None, task["length"])]


def mean(label: str, length: int) -> float:
    return 100 * fmean(one["score"] for one in found(label, length))


def test_the_default_plan_in_both_phases() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[-1] == "bytes read, prefill")
    expected = dict[str, Row]()
    for name, label in ANCHORS.items():
        reads = [100 * fmean(one[f"{phase}_reads"]["total"] for one in found(label)) for phase in ("decode", "prefill")]
        expected[name] = (f"{mean(label, 4096):.1f}%", f"{mean(label, 16384):.1f}%", *(f"{x:.0f}%" for x in reads))
    assert {row[0]: row[1:] for row in rows} == expected
    words = " ".join(PAGE.split())
    for label, text in (
        ("default", "loses {} and {} points"),
        ("default, prompt too", "{} points at 4096 tokens and {}"),
    ):
        lost = [f"{mean('dense', n) - mean(ANCHORS[label], n):.1f}" for n in (4096, 16384)]
        assert text.format(*lost) in words
    assert all(mean("dense", n) - mean(ANCHORS["default"], n) < 1 for n in (4096, 16384))
