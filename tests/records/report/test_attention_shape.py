"""A record of attention whose lists do not fit each other is refused where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report.reading import load
from tests.records.report import factory


def changed(*way: Any, value: Any) -> dict[str, Any]:
    content = factory.attention()
    *first, last = ("results", *way)
    inside: Any = content
    for key in first:
        inside = inside[key]
    inside[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (changed("rows", "text", "sinks", 1, value=[0.5]), "results.rows.text.sinks[1]: expected 2 items"),
        (changed("rows", "answer", "tops", 0, 1, value=[0.5]), "results.rows.answer.tops[0][1]: expected 3 items"),
        (changed("windows", value=[None] * 4), "expected 4 items"),
        (changed("top_keys", value=[16, 16, 20]), "results.top_keys: expected whole numbers"),
        (changed("distance_edges", value=[0, 1, 4, 2, 8]), "results.distance_edges"),
        (changed("last_keys", value=[-1, 64]), "results.last_keys"),
        (changed("retrieval", value={}), "results.retrieval: expected at least one task"),
        (changed("retrieval", "single", "score", value=[[0.5, 1.5]] * 3), "retrieval.single.score[0][1]"),
        (changed("rows", "text", "best", 0, 0, value=float("nan")), "results.rows.text.best[0][0]"),
        (changed("rows", "text", "sinks", 0, value=None), "results.rows.text.sinks[0]: expected a list"),
        (changed("rows", "answer", value={}), "results.rows.answer.count is missing"),
        (changed("taus", value=[0.45]), "results.rows.text.match[0][0]: expected 1 items"),
    ],
)
def test_lists_that_do_not_fit(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        load(factory.save(tmp_path, content))
    assert words in str(error.value) and "measure it again with longreach attention" in str(error.value)


def test_what_the_command_writes_is_taken(tmp_path: Path) -> None:
    assert load(factory.save(tmp_path, factory.attention())).kind == "attention"
    assert load(factory.save(tmp_path, factory.attention(1, 1, None))).lengths == [4096]
