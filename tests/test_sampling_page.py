"""The tables of docs/magicpig/figures.md are those of its records' reports, and what its text says holds for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from longreach.methods.magicpig import PRESETS
from longreach.records.report import sampling_figures
from longreach.records.report.blocks import Table
from longreach.records.report.reading import load
from longreach.records.report.sampling import sampling
from longreach.records.report.sampling_lines import CONTROLS, GROUP, OWN, at_bytes, bytes_read, lines, method_of
from tests.doc_tables import ROOT, Row, record, tables

PAGE = (ROOT / "docs" / "magicpig" / "figures.md").read_text()
WORDS = " ".join(PAGE.split())
LENGTHS = (4096, 16384)
SHOWN = (  # in the order of the page
    *product(("Error of magicpig's presets", "Keys sampled", "Error of methods at the bytes",
              "Estimates with exact scores", "Top-k and samples"), LENGTHS),
    *product(("Error where a query head", "Error by the number of bits", "Attention on the best keys", "Geometry"),
             (4096,)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("curves", "layer_curves"):
        monkeypatch.setattr(sampling_figures, name, lambda panels: b"png")


def results(length: int) -> dict[str, Any]:
    found: dict[str, Any] = record(f"mini-sampling-{length}")["results"]
    return found


def report_of(length: int, title: str) -> tuple[Row, list[Row]]:
    path = ROOT / "benchmarks" / "results" / f"mini-sampling-{length}.json.gz"
    (table,) = (b for b in blocks(path) if b.title.startswith(title))
    return table.head, [tuple(cell.text for cell in row) for row in table.rows]


@cache
def blocks(path: Any) -> list[Table]:
    return [b for b in sampling(load(path), "it") if isinstance(b, Table)]


def test_every_table() -> None:
    *found, expected = tables(PAGE)
    assert expected[0] == ("expected", "found") and len(expected[1]) == 3
    for (title, length), (head, rows) in zip(SHOWN, found, strict=True):
        assert (head, rows) == report_of(length, title), (title, length)


def test_records_are_of_clean_trees_and_made_by_the_commands() -> None:
    for length in LENGTHS:
        mine = record(f"mini-sampling-{length}")
        assert mine["commit"] and mine["dirty"] is False and mine["config"]["length"] == length
        tasks = ",".join(mine["tasks"])
        assert f"--length {length}" in PAGE and (length == 4096 or f"--tasks {tasks} " in PAGE)
        assert mine["config"]["rows"] == 4 and mine["config"]["samples"] == 1


def presets() -> Iterator[tuple[int, dict[str, Any], int, int]]:
    for length, (bits, count) in product(LENGTHS, PRESETS):
        yield length, results(length), bits, count


def test_groups_against_own_samples_and_top_k() -> None:
    changes, bare, wins = list[float](), list[float](), set[tuple[int, int, int]]()
    for length, found, bits, count in presets():
        own, group = (method_of(found, line, bits, count)["mean"] for line in (OWN, GROUP))
        label = f"magicpig bits={bits} tables={count} share=group"
        changes.append(1 - group / own)
        bare.append(method_of(found, CONTROLS[1], bits, count)["mean"] / group)
        assert group < found["top_k_in_place"][label]["mean"]
        if group < found["top_k_same_keys"][label]["mean"]:
            wins.add((length, bits, count))
    assert (f"{min(changes):.0%}", f"{max(changes):.0%}") == ("17%", "22%") and "17 to 22%" in WORDS
    assert (f"{min(bare):.1f}", f"{max(bare):.1f}") == ("1.5", "2.3")
    assert {(length, *pair) for length in LENGTHS for pair in PRESETS} - wins == {(4096, 10, 75)}


def test_what_is_read_at_six_percent() -> None:
    few = [(length, bits, count) for length, found, bits, count in presets()
           if bytes_read(method_of(found, GROUP, bits, count)) <= 0.06]  # fmt: skip
    assert few == [(16384, 10, 75)]
    found = results(16384)
    label = "magicpig bits=10 tables=75 share=group"
    group, own = (method_of(found, line, 10, 75)["mean"] for line in (GROUP, OWN))
    best = found["top_k_same_keys"][label]["mean"]
    assert f"{group:.3f} to {best:.3f}, at 4.6%" in WORDS and f"no, {own:.3f}" in WORDS


def test_other_methods_read_more_for_their_error() -> None:
    for _, found, bits, count in presets():
        mine = method_of(found, GROUP, bits, count)
        for name in ("quest", "loki", "kascade"):
            theirs = at_bytes(lines(found)[name], bytes_read(mine))
            assert theirs is None or theirs > 1.5 * mine["mean"]


def test_samples_by_exact_scores() -> None:
    less, more = list[float](), list[float]()  # of systematic sampling over iid draws, of top-k over these
    for length in LENGTHS:
        methods = results(length)["methods"]
        for k in (0.02, 0.05, 0.1, 0.2):
            top, some = (methods[f"oracle_top_k k={k}{x}"]["mean"] for x in ("", " choose=sample"))
            assert some < top / 2
        loki = [methods[f"loki k={k}{x}"]["mean"] for k in (0.05, 0.2) for x in ("", " choose=sample")]
        for ratio in (f"{loki[1] / loki[0]:.2f}", f"{loki[3] / loki[2]:.2f}"):
            assert re.search(rf"\b{ratio}\b", WORDS)
        exact = results(length)["estimators"]
        for read, error in zip(exact["iid"]["read"], exact["iid"]["mean"], strict=True):
            for name, into in (("systematic", less), ("top_k", more)):
                theirs = at(exact[name], read)
                into += [] if theirs is None else [theirs / error]
    assert f"{1 - max(less):.0%} {1 - min(less):.0%}" == "15% 46%" and "15 to 46% less error" in WORDS
    assert f"{min(more):.1f} to {max(more):.1f} times their error" in WORDS


def at(mine: dict[str, Any], read: float) -> float | None:
    points = [{"method": {"name": ""}, "reads": {"total": x}, "mean": y}
              for x, y in zip(mine["read"], mine["mean"], strict=True)]  # fmt: skip
    return at_bytes(points, read)


def test_geometry() -> None:
    found = results(4096)["geometry"]
    means = [sum(layer) / 4 for layer in found["first_to_mean"]]
    assert f"{means[0]:.2f}" == "-0.80" and (f"{min(means[1:]):.2f}", f"{max(means):.2f}") == ("0.30", "0.68")
    least = [min(layer) for layer in found["mean_keys"]["min"]]
    assert [n for n, value in enumerate(least) if value > 0.89] == [0, 1, 2, 3, 4, 5, 7]
    norms = [sum(layer) / 4 for layer in found["first_value_norm"]]
    assert f"{norms[0]:.0%}" == "8%" and norms[1] > 1 > max(norms[2:])
    assert "first_token" in record("mini-sampling-4096")["samples"][0]
    assert len({s["first_token"] for s in record("mini-sampling-4096")["samples"]}) == 1
