"""Tables and pictures of attention say what the record holds."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report import attention_figures as module
from longreach.records.report.attention import attention, retrieval_heads
from longreach.records.report.blocks import Figure, Table, Text
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Panels by the title of the first."""
    found: dict[str, Any] = {}

    def take(panels: Any, *more: Any) -> bytes:
        found[panels[0].title] = (panels, more)
        return b"png"

    monkeypatch.setattr(module, "maps", take)
    monkeypatch.setattr(module, "layer_curves", lambda panels: take([panels[0], *panels]))
    return found


def test_tables_are_means_over_heads(drawn: Any) -> None:
    content = factory.attention()
    blocks = attention(record_of(content), "attention")
    rows = content["results"]["rows"]["text"]
    table = only(blocks, Table, "By layer, text rows")
    assert table.head == ("layer", "window", "first 4", "last 64", "last 256", "top 16", "top 256", "top 1024",
                          "keys for 95%", "cos to previous", "best cos", "match 0.45", "match 0.75")  # fmt: skip
    found = cells(table)
    assert found["1"][0] == "128" and found["0"][0] == "-"
    assert found["0"][1] == f"{sum(rows['sinks'][0]) / 2:.1%}"
    assert found["1"][3] == f"{sum(head[1] for head in rows['windows'][1]) / 2:.1%}"
    assert found["1"][6] == f"{sum(head[2] for head in rows['tops'][1]) / 2:.1%}"
    assert found["0"][7] == f"{sum(rows['cover'][0]) / 2:.3g}"
    assert found["1"][11] == f"{sum(head[1] for head in rows['match'][1]) / 2:.1%}"
    assert found["2"][8:] == ["-"] * 4  # not known
    assert "not known in layers 2: it does not rotate" in only(blocks, Text, "Queries before").text
    assert "it would have chosen 8 of these 12 tokens itself" in only(blocks, Text, "4 prompts of single, several").text


def test_retrieval_heads_come_best_first(drawn: Any) -> None:
    content = factory.attention()
    retrieval = content["results"]["retrieval"]
    retrieval["single"]["score"] = [[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]]
    assert retrieval_heads(content["results"])[:2] == [(0.875, 0, 1), (0.25, 1, 0)]
    table = only(attention(record_of(content), "attention"), Table, "Retrieval heads")
    rows = [[c.text for c in row] for row in table.rows]
    needle = retrieval["single"]["needle"]
    assert [row[:4] for row in rows] == [["0", "1", "87.5%", "100.0%"], ["1", "0", "25.0%", "50.0%"]]
    assert rows[0][4] == f"{needle[0][1]:.1%}"


def test_pictures_are_the_records(drawn: Any) -> None:
    content = factory.attention()
    results, rows = content["results"], content["results"]["rows"]
    blocks = attention(record_of(content), "a")
    names = ["sinks", "recent", "distance", "top", "top-k", "retrieval", "needle", "queries", "match", "agreement"]
    assert [b.file for b in blocks if isinstance(b, Figure)] == [f"a-{name}.png" for name in names]
    sinks, _ = drawn["first 4 keys, text rows"]
    assert [p.title for p in sinks] == ["first 4 keys, text rows", "first 4 keys, answer rows"]
    assert sinks[1].values == tuple(map(tuple, rows["answer"]["sinks"])) and sinks[0].rows == ("0", "1 (w 128)", "2")
    recent, _ = drawn["last 64 keys, text rows"]
    assert recent[2].title == "last 256 keys, text rows" and recent[2].values[1][0] == rows["text"]["windows"][1][0][1]
    top, _ = drawn["top 256 keys, text rows"]
    assert top[0].values[2][1] == rows["text"]["tops"][2][1][1]
    queries, (_, _, scale) = drawn["to previous, text rows"]
    assert queries[2].title == "best, text rows" and queries[2].values[2] == (None, None) and scale.low == 0
    agreement, _ = drawn["same keys, text rows"]
    assert agreement[3].title == "weight kept, answer rows"
    assert agreement[3].values == tuple(map(tuple, rows["answer"]["agreement"]["mass"]))
    retrieval, _ = drawn["single"]
    assert retrieval[0].values == tuple(map(tuple, results["retrieval"]["single"]["needle"]))  # drawn after the scores


def test_curves_are_means_over_heads(drawn: Any) -> None:
    content = factory.attention()
    attention(record_of(content), "a")
    (_, text, answer), _ = drawn["text rows"]  # top-k is the last of its name
    tops = content["results"]["rows"]["answer"]["tops"]
    assert text.x == ("16", "256", "1024") and answer.layers[1][2] == pytest.approx(sum(h[2] for h in tops[1]) / 2)
    panel = module._distances(content["results"], "text")
    assert panel.x == ("0", "1", "2-3", "4-7") and len(panel.layers) == 3


def test_virtual_sinks_and_negative_cosines(drawn: Any) -> None:
    content = factory.attention(window=None)
    rows = content["results"]["rows"]["text"]
    rows["virtual_sink"][1] = [0.5, 0.25]
    rows["previous"][0] = [-0.5, 0.5]
    blocks = attention(record_of(content), "a")
    table = only(blocks, Table, "By layer, text rows")
    assert table.head[:3] == ("layer", "first 4", "virtual sink") and cells(table)["1"][1] == "37.5%"
    assert cells(table)["0"][8] == "0"
    assert [p.title for p in drawn["first 4 keys, text rows"][0]][2:] == ["virtual sink, text rows",
                                                                          "virtual sink, answer rows"]  # fmt: skip
    assert drawn["to previous, text rows"][1][2].low == -0.5
    assert "virtual sink" in only(blocks, Text, "Shares are").text


def test_nothing_known_of_queries_leaves_their_pictures_out(drawn: Any) -> None:
    content = factory.attention()
    for rows in content["results"]["rows"].values():
        rows |= {name: [None] * 3 for name in ("previous", "best", "match")}
    files = {b.file for b in attention(record_of(content), "a") if isinstance(b, Figure)}
    assert not {"a-queries.png", "a-match.png"} & files and len(files) == 8
