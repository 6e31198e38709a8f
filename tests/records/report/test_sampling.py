"""Tables and pictures of `longreach sampling` show what the record holds, and what a record must hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report import sampling_figures as module
from longreach.records.report.blocks import Figure, Table, Text
from longreach.records.report.reading import load
from longreach.records.report.sampling import eq_21, sampling
from longreach.records.report.sampling_lines import at_bytes
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of

GROUP = "magicpig bits=10 tables=75 share=group"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    for name in ("curves", "layer_curves"):
        monkeypatch.setattr(module, name, lambda panels: calls.append(panels) or b"png")
    return calls


def test_the_papers_estimate_of_keys() -> None:
    """Against a binomial's tail: two tables of 150 or more, each with probability 2^-10."""
    x = 2.0**-10
    tail = sum(math.comb(150, j) * x**j * (1 - x) ** (150 - j) for j in range(2, 151))
    assert eq_21(10, 150) == pytest.approx(tail, rel=1e-9)


def test_tables(drawn: list[Any]) -> None:
    blocks = sampling(record_of(factory.sampling()), "sampling")
    presets = cells(only(blocks, Table, "Error of magicpig's presets"))
    assert presets["10, 75"] == ["7.3%", "4.9%", "0.0133", "0.0107", "-20.0%", "0.0133", "0.016", "0.0267",
                                 "0.02 (7.3%)"]  # fmt: skip
    assert list(presets) == ["8, 75", "10, 75", "10, 150"]
    sampled = cells(only(blocks, Table, "Keys sampled and bytes read"))
    assert sampled["10, 150"] == [f"{eq_21(10, 150):.1%}", "3.7%", "4.9%", "3.7%", "11.0%", "58.6%"]
    pairs = cells(only(blocks, Table, "Error where a query head samples about 4%"))
    assert list(pairs) == ["7, 20"] and pairs["7, 20"][3:5] == ["0.0714", "0.0571"]
    assert list(cells(only(blocks, Table, "Error by the number of bits"))) == [f"{b}, 120" for b in (11, 10, 9, 8, 7)]
    choices = cells(only(blocks, Table, "Top-k and samples"))
    assert choices == {"5.0%": ["0.2", "0.08", "0.40x"], "20.0%": ["0.05", "0.02", "0.40x"]}
    estimates = only(blocks, Table, "Estimates with exact scores").rows
    assert [c.text for c in estimates[2]] == ["iid draws", "5.0%", "0.1", "0.05"]
    assert cells(only(blocks, Table, "Attention on the best keys"))["10.0%"] == ["80.0%", "70.0%"]
    geometry = cells(only(blocks, Table, "Geometry by layer"))
    assert list(geometry) == ["0", "2"]  # layer 1 has a window
    assert geometry["2"] == ["1", "0.5", "0.5", "0.75", "-0.25", "0.125", "0.5", "6"]
    assert "The last 4 rows" in only(blocks, Text, "2 prompts of vt, cwe, 4000 tokens").text
    assert only(blocks, Text, "kascade was left out: no plan")


def test_methods_at_equal_bytes(drawn: list[Any]) -> None:
    blocks = sampling(record_of(factory.sampling()), "sampling")
    table = only(blocks, Table, "Error of methods at the bytes")
    assert table.head[3:] == ("quest", "oracle_top_k", "oracle_top_k choose=sample")
    row = cells(table)["10, 150"]  # reads 14.6%
    assert row[0] == "14.6%" and float(row[2]) == pytest.approx(0.02 / 0.0865, rel=0.2)
    assert cells(table)["10, 75"][2] == "-"  # quest reads 11% at least


def test_errors_between_budgets() -> None:
    some = [{"method": {"name": "x"}, "reads": {"total": read}, "mean": error} for read, error in
            ((0.01, 0.4), (0.04, 0.2), (0.16, 0.2))]  # fmt: skip
    assert at_bytes(some, 0.02) == pytest.approx(0.4 / math.sqrt(2))
    assert at_bytes(some, 0.01) == pytest.approx(0.4) and at_bytes(some, 0.08) == pytest.approx(0.2)
    assert at_bytes(some, 0.005) is None and at_bytes(some, 0.2) is None


def test_pictures(drawn: list[Any]) -> None:
    blocks = sampling(record_of(factory.sampling()), "sampling")
    assert [b.file for b in blocks if isinstance(b, Figure)] == [
        f"sampling-{name}.png" for name in ("bytes", "layers", "estimators", "geometry", "mass")
    ]
    (methods, pigs), (by_layer, exact), (mean, _), geometry, masses = drawn
    assert [s.label for s in methods.series] == ["magicpig share=own", "magicpig share=group", "quest", "oracle_top_k",
                                                 "oracle_top_k choose=sample"]  # fmt: skip
    assert methods.series[3].x == (0.05, 0.2)  # an oracle's scores are free
    assert methods.shares and methods.log and len(pigs.series) == 4
    assert by_layer.series[1].label == "magicpig share=group" and math.isnan(by_layer.series[1].y[1])
    assert by_layer.series[1].y[2] == pytest.approx(0.8 / 75 * 1.2)
    assert exact.series[2].y[0] == pytest.approx(0.05)
    assert [s.y for s in mean.series] == [(0.2, 0.1), (0.1, 0.05), (0.05, 0.025)]
    assert [s.label for s in geometry[0].series][3] == "first key and mean key"
    assert masses[0].layers == ((0.8, 0.95), (0.8, 0.95)) and masses[0].x == ("10%", "40%")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["methods"].pop(GROUP), "magicpig share=group with 10 bits and 75 tables is missing"),
        (lambda r: r["top_k_in_place"].pop(GROUP), f"results.top_k_in_place.{GROUP} is missing"),
        (lambda r: r["methods"][GROUP]["errors"].pop(), "expected 3 items"),
        (lambda r: r["methods"][GROUP].update(line="x"), "expected one of magicpig share=group"),
        (lambda r: r["methods"][GROUP].pop("search"), "search is missing"),
        (lambda r: r["methods"][GROUP]["method"].update(bits=40), "expected bits up to 16"),
        (lambda r: r["mass"]["all"].__setitem__(1, r["mass"]["all"][0]), "null for layers with a window"),
        (lambda r: r["mass"]["all"][0][0].pop(), "expected 2 items"),
        (lambda r: r["estimators"]["iid"]["read"].append(0.5), "estimators.iid.read: expected 2 items"),
        (lambda r: r["geometry"]["first_to_mean"].pop(), "geometry.first_to_mean"),
        (lambda r: r.update(windows=[1, 1, 1]), "expected a layer without a window"),
        (lambda r: r["fitted"]["pairs"].append([9, 9]), "with 9 bits and 9 tables is missing"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, change: Any, words: str) -> None:
    content = factory.sampling()
    change(content["results"])
    with pytest.raises(InvalidInput, match="longreach sampling") as error:
        load(factory.save(tmp_path, content))
    assert words in str(error.value)


def test_without_ablations_their_tables_are_left_out(drawn: list[Any]) -> None:
    content = factory.sampling()
    content["results"]["fitted"]["pairs"] = []
    titles = [b.title for b in sampling(record_of(content), "sampling") if isinstance(b, Table)]
    assert not [title for title in titles if title.startswith(("Error where", "Error by"))]
