"""What docs/plans.md says of plans made of the first prompt, from their record."""

from __future__ import annotations

from statistics import fmean

from tests.doc_tables import ROOT, Row, record, section, tables

LABELS = {
    "dense attention": "dense",
    "kascade, made of a prompt of niah_multivalue": "kascade plan=auto",
    "kascade, made of a window of prose": "kascade plan=benchmarks/plans/kascade-mini-auto-prose.json",
    "kascade, calibrated on 36 prompts": "kascade plan=benchmarks/plans/kascade-mini-0-4-8.json",
    "kascade, calibrated, two anchors": "kascade",
    "loki, made of a prompt of niah_multivalue": "loki plan=auto",
    "loki, calibrated": "loki",
}
PAGE = section((ROOT / "docs" / "plans.md").read_text(), "Plans made of the first prompt", "The file")


def expected(label: str) -> Row:
    results = [task["results"][label] for task in record("mini-automatic-plans-4096")["tasks"].values()]
    scores, reads = [r["score"] for r in results], [r["decode_reads"]["total"] for r in results]
    return (*(f"{score:.1%}" for score in scores), f"{fmean(scores):.1%}", f"{fmean(reads):.1%}")


def test_scores_are_those_of_the_record() -> None:
    (rows,) = (rows for head, rows in tables(PAGE) if head[-1] == "bytes")
    assert {row[0]: row[2:] for row in rows} == {name: expected(label) for name, label in LABELS.items()}


def test_costs_are_those_of_the_record() -> None:
    results = record("mini-automatic-plans-4096")["tasks"]["vt"]["results"]
    (kascade,), (loki,) = (results[label]["plans"] for label in ("kascade plan=auto", "loki plan=auto"))
    read = results["dense"]["seconds"]["read"]
    words = " ".join(PAGE.split())
    told = f"takes {kascade['seconds']:.2f} s beside a prefill of {read:.1f} s ({kascade['seconds'] / read:.0%})"
    assert told in words and f"one of Loki {loki['seconds']:.2f} s" in words
    assert kascade["about"] == "anchors 0 4 8" and kascade["seconds"] < 0.15 * read
