"""The tables of docs/mka.md and docs/block_mka.md are those of their records."""

from __future__ import annotations

from tests.doc_tables import ROOT, record, section, tables

MKA, BLOCK = ((ROOT / "docs" / name).read_text() for name in ("mka.md", "block_mka.md"))


def percent(x: float) -> str:
    return f"{100 * x:.0f}%"


def test_shares_of_far_mass_that_recall_finds() -> None:
    (_, rows) = next(tables(section(MKA, "What recall finds")))
    found = [record(f"mini-mka-recall-{length}") for length in (2048, 4096)]
    assert [(r["block"], r["window"]) for r in found] == [(32, 128), (64, 512)]
    names = {
        "oracle": ("before", "oracle"),
        "`bounds`": ("before", "bounds"),
        "`index`, trained": ("after", "index"),
        "`summary`": ("before", "summary"),
        "`hash`, 128 bits": ("before", "hash 128"),
        "`hash`, 32 bits": ("before", "hash 32"),
        "`index`, untrained": ("before", "index"),
        "chance": ("before", "chance"),
    }
    assert [row[0] for row in rows] == list(names)
    for name, *cells in rows:
        when, way = names[name]
        assert cells == [percent(r[when]["all"][way][count]) for r in found for count in ("4", "8")], name


def test_scores_of_block_mka() -> None:
    head, rows = next(tables(section(BLOCK, "Answers", "Limits")))
    tasks = record("mini-block-mka-4096")["tasks"]
    methods = ["dense", "block_mka recall=bounds", "block_mka", "block_mka recall=hash"]
    assert head == ("task", "dense", *(f"`block_mka recall={x}`" for x in ("bounds", "summary", "hash")))
    scores = {name: [task["results"][m]["score"] for m in methods] for name, task in tasks.items()}
    scores["mean"] = [sum(column) / len(column) for column in zip(*scores.values(), strict=True)]
    *scored, read = rows
    assert scored == [(name, *map(percent, values)) for name, values in scores.items()]
    bytes_read = [
        sum(share(task["results"][m]["decode_reads"]) for task in tasks.values()) / len(tasks) for m in methods
    ]
    assert read == ("bytes, decode", *map(percent, bytes_read))
    assert all(len(task["samples"]) == 3 for task in tasks.values())


def share(reads: dict[str, float]) -> float:
    return float(reads["total"])
