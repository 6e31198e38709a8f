"""What docs/plans.md says of plans made of the first prompt, from their record."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from longreach.methods.kascade.automatic import EASY, SERVED
from longreach.plans import load
from tests.doc_tables import ROOT, Row, record, section, tables

PLANS = "kascade plan=benchmarks/plans/kascade-mini"
LABELS = {
    "dense attention": "dense",
    "kascade, made of a prompt of niah_multivalue": "kascade plan=auto",
    "kascade, made of a window of prose": f"{PLANS}-auto-prose.json",
    "kascade, made of a needle in repeated text": f"{PLANS}-auto-needle-80.json",
    "kascade, made of code": f"{PLANS}-auto-code-80.json",
    "kascade, calibrated on 36 prompts": f"{PLANS}-0-4-8.json",
    "kascade, calibrated, two anchors": "kascade plan=kascade-longreach-mini-0-4",
    "loki, made of a prompt of niah_multivalue": "loki plan=auto",
    "loki, calibrated": "loki",
}
AT_70 = {
    "repeated text": f"{PLANS}-auto-repeated.json",
    "prose of 2100 tokens": f"{PLANS}-auto-short-prose.json",
    "a needle in repeated text": f"{PLANS}-auto-needle.json",
    "code": f"{PLANS}-auto-code.json",
    "calibrated on 36 prompts": "kascade",
}
PAGE = section((ROOT / "docs" / "plans.md").read_text(), "Plans made of the first prompt", "The file")


def anchors(label: str, results: list[dict[str, Any]]) -> str:
    """Of a plan: what the record says of one that was made, else those of its file."""
    if label.startswith("kascade plan=auto"):
        return str(results[0]["plans"][0]["about"]).removeprefix("anchors ").partition(" (")[0]
    if label.startswith("kascade"):
        name = label.partition("plan=")[2] or "kascade-longreach-mini"
        path = name if "/" in name else f"src/longreach/plans/shipped/{name}.json"
        return " ".join(map(str, load(ROOT / path, "kascade").values["anchors"]))
    return ""


def expected(name: str, labels: dict[str, str]) -> list[Row]:
    rows = []
    for shown, label in labels.items():
        results = [task["results"][label] for task in record(name)["tasks"].values()]
        scores, reads = [r["score"] for r in results], [r["decode_reads"]["total"] for r in results]
        shares = (*(f"{score:.1%}" for score in scores), f"{fmean(scores):.1%}", f"{fmean(reads):.1%}")
        rows.append((shown, anchors(label, results), *shares))
    return rows


def test_scores_are_those_of_the_records() -> None:
    found = [rows for head, rows in tables(PAGE) if head[-1] == "bytes"]
    names = "mini-automatic-plans-4096", "mini-automatic-plans-prompts-4096"
    assert found == [expected(name, labels) for name, labels in zip(names, (LABELS, AT_70), strict=True)]
    assert (SERVED, EASY) == (0.8, 0.7) and [len(row[1].split()) for row in found[1]][:2] == [1, 2]


def test_costs_are_those_of_the_record() -> None:
    results = record("mini-automatic-plans-4096")["tasks"]["vt"]["results"]
    (kascade,), (loki,) = (results[label]["plans"] for label in ("kascade plan=auto", "loki plan=auto"))
    tasks = record("mini-automatic-plans-4096")["tasks"].values()
    read = median(task["results"]["dense"]["seconds"]["read"] for task in tasks)
    words = " ".join(PAGE.split())
    took = f"{kascade['seconds']:.2f} s in addition to a prefill of {read:.1f} s ({kascade['seconds'] / read:.0%},"
    assert f"takes {took}" in words and f"one of Loki {loki['seconds']:.2f} s" in words
