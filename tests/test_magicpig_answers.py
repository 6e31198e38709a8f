"""Tables and sentences of docs/magicpig/answers.md are those of the records that it names."""

from __future__ import annotations

from typing import Any

from tests.doc_tables import ROOT, Row, record, tables

PAGE = (ROOT / "docs" / "magicpig" / "answers.md").read_text()
WORDS = " ".join(PAGE.split())
RECORDS = ("baselines", "group", "own")
FED = "-fed"  # the question is read by the method


def results(method: str, which: str, rest: str = "") -> dict[str, Any]:
    """Task -> a method's result."""
    tasks = record(f"mini-magicpig-{which}{rest}-4096")["tasks"]
    return {name: task["results"][method] for name, task in tasks.items()}


def record_of(method: str) -> str:
    return next(name for name in RECORDS if method in record(f"mini-magicpig-{name}-4096")["tasks"]["vt"]["results"])


def mean(method: str, rest: str = "") -> float:
    """Mean score of the tasks, in percent."""
    scores = [one["score"] for one in results(method, record_of(method), rest).values()]
    return 100 * sum(scores) / len(scores)


def reads(method: str) -> float:
    found = results(method, record_of(method)).values()
    return 100 * sum(one["decode_reads"]["total"] for one in found) / len(found)


def scored(method: str) -> Row:
    mine, dense = results(method, record_of(method)), results("dense", record_of(method))
    lost = {name: dense[name]["score"] - mine[name]["score"] for name in mine}
    worst = max(lost, key=lambda name: lost[name])
    told = "-" if method == "dense" else f"{worst} {100 * mine[worst]['score']:.1f}%"
    return f"{reads(method):.1f}%", f"{mean(method):.1f}%", f"{mean(method, FED):.1f}%", told


def read_on(method: str) -> Row:
    found = record("mini-magicpig-perplexity-4096")["results"]
    mine, dense = found[method], found["dense"]["decode"]["nll"]
    over = "-" if method == "dense" else f"{mine['decode']['nll'] - dense:+.3f}"
    return f"{100 * mine['decode_reads']['total']:.1f}%", f"{mine['decode']['perplexity']:.2f}", over


def written(method: str) -> Row:
    mine = record("mini-magicpig-generation-4096")["results"][method]
    low, high = mine["over_dense_interval_95"]
    over = "-" if method == "dense" else f"{low:+.2f} to {high:+.2f}"
    share = mine["decode_reads"]["total"]
    return f"{100 * share:.1f}%", f"{mine['perplexity']:.1f}", over, f"{100 * mine['repeated']:.1f}%"


TABLES = (
    (scored, {label for name in RECORDS for label in record(f"mini-magicpig-{name}-4096")["methods"]}),
    (read_on, set(record("mini-magicpig-perplexity-4096")["methods"])),
    (written, set(record("mini-magicpig-generation-4096")["methods"])),
)


def test_tables_hold_all_of_the_records() -> None:
    found = list(tables(PAGE))
    assert len(found) == len(TABLES)
    for (_, rows), (numbers, methods) in zip(found, TABLES, strict=True):
        assert {name.strip("`") for name, *_ in rows} == methods
        for name, *told in rows:
            assert tuple(told) == numbers(name.strip("`")), name


def test_set_ups() -> None:
    for name in RECORDS:
        for rest, question in (("", "prefill"), (FED, "decode")):
            found = record(f"mini-magicpig-{name}{rest}-4096")
            assert found["config"]["samples"] == 100 and found["config"]["question"] == question
            assert len(found["tasks"]) == 11 and not found["dirty"]
    windows = record("mini-magicpig-perplexity-4096")["config"]
    assert f"{windows['windows']} windows of prose of {windows['length']} tokens" in WORDS
    assert f"the last {windows['decode_tokens']} tokens" in WORDS
    drawn = record("mini-magicpig-generation-4096")["config"]
    assert f"each of {drawn['windows']} windows of {drawn['length']} tokens" in WORDS
    assert f"samples {drawn['steps']} tokens at temperature {drawn['temperature']:g}" in WORDS


def test_sentences() -> None:
    costs = [mean(name) - mean(name, FED) for name in ("magicpig budget=0.1", "magicpig budget=0.05")]
    assert f"{costs[0]:.1f} and {costs[1]:.1f} points at smaller" in WORDS
    alone = "magicpig bits=10 tables=150 dense_layers=[]"
    assert f"is {mean(alone):.1f}% and {mean(alone, FED):.1f}%, at {reads(alone):.0f}% of the bytes" in WORDS
    pairs = ("bits=9 tables=120", "bits=10 tables=150", "bits=10 tables=220")
    apart = [
        abs(mean(f"magicpig {pair}", rest) - mean(f"magicpig {pair} share=own", rest))
        for pair in pairs
        for rest in ("", FED)
    ]
    assert f"differ by at most {max(apart):.1f} points" in WORDS
    counts = [
        100 * results(f"oracle_top_k k=0.05{rest}", "baselines")["cwe"]["score"] for rest in (" choose=sample", "")
    ]
    assert f"scores {counts[0]:.1f}% with `choose=sample` and {counts[1]:.1f}% with the largest keys" in WORDS
    redone = [reads(f"magicpig budget=0.1 redo={x}") for x in (0.5, 0.3)]
    assert f"becomes {redone[0]:.0f}% or {redone[1]:.0f}%" in WORDS
    generated = record("mini-magicpig-generation-4096")["results"]
    last = {name: found["by_position"][-1]["nll"] for name, found in generated.items()}
    assert max(last, key=lambda name: last[name]) == "dense"
    assert all(low <= 0 <= high for low, high in (found["over_dense_interval_95"] for found in generated.values()))
