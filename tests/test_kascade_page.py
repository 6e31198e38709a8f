"""What docs/kascade says of scores with and without a map between heads, from its record."""

from __future__ import annotations

from statistics import fmean

from tests.doc_tables import ROOT, Row, record, tables

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
    page = (ROOT / "docs" / "kascade" / "README.md").read_text()
    (rows,) = (rows for head, rows in tables(page) if head[1:3] == ("multivalue", "multiquery"))
    assert {row[0]: row[1:] for row in rows} == {name: shown(label) for name, label in LABELS.items()}
    lost = fmean(scores(LABELS["mapped heads"])) - fmean(scores(LABELS["head of the same number"]))
    assert f"Without a map {100 * lost:.0f} points of the mean are lost" in page
