"""What a record of `longreach fusion` must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report.reading import load
from tests.records.report import factory

A3 = "dense fuse=a3 fuse.ratio=0.3"


def test_a_whole_record_is_read(tmp_path: Path) -> None:
    record = load(factory.save(tmp_path, factory.fusion()))
    assert record.kind == "fusion" and record.dense is None and record.lengths == [1024]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["results"].pop(A3), f"results.{A3} is missing"),
        (lambda r: r["methods"].pop(A3), f"methods.{A3} is missing"),
        (lambda r: r["methods"][A3].pop("fuse"), f"methods.{A3}.fuse is missing"),
        (lambda r: r["results"][A3]["layers"]["key"].pop(), "expected 4 items"),
        (lambda r: r["results"][A3]["layers"].pop("value"), "layers.value is missing"),
        (lambda r: r["results"][A3]["tasks"].pop("vt"), "tasks.vt is missing"),
        (lambda r: r["results"][A3].update(hits_attention=1.5), "a number from 0 to 1"),
        (lambda r: r["samples"][0].update(tokens=0), "at least 1 token"),
        (lambda r: r["config"].pop("top"), "config.top is missing"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, change: Any, words: str) -> None:
    content = factory.fusion()
    change(content)
    with pytest.raises(InvalidInput, match="longreach fusion") as error:
        load(factory.save(tmp_path, content))
    assert words in str(error.value)
