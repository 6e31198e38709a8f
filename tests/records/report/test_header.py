"""The header says what was measured, and loudly what cannot be repeated or compared."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.records.report.blocks import Table, Text
from longreach.records.report.header import header, warnings
from tests.records.report import factory
from tests.records.report.factory import cells, only, record_of


def test_one_record_is_told_in_full() -> None:
    found = header([record_of(factory.small())])
    told = cells(only(found, Table))
    assert told["model"] == ["small-model"] and told["weights (sha256)"] == ["ab" * 32]
    assert told["commit"] == ["c0ffee" + "0" * 34] and told["device"] == ["A processor (cpu)"]
    assert told["torch"] == ["2.13.0"] and told["python"] == ["3.11.9"] and told["context"] == ["8192 tokens"]
    assert not any(isinstance(b, Text) for b in found)


def test_what_records_share_and_what_they_differ_in() -> None:
    other = factory.sweep(1024)
    other["versions"]["torch"] = "2.11.0"
    found = header([record_of(factory.small(), "a.json"), record_of(other, "b.json")])
    shared, differ = (b for b in found if isinstance(b, Table))
    assert "torch" not in cells(shared) and cells(shared)["records"] == ["eval: a.json, b.json"]
    assert differ.head == ("record", "length", "torch")
    assert cells(differ) == {"a.json": ["4096 tokens", "2.13.0"], "b.json": ["1024 tokens", "2.11.0"]}
    assert only(found, Text).text == "The records differ in versions of torch." and only(found, Text).loud


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dirty": True}, ["b.json", "DIRTY tree", "c0ffee000000", "measure it again"]),
        ({"dirty": True, "commit": None}, ["DIRTY tree at an unknown commit"]),
        ({"commit": None, "dirty": None}, ["b.json names no commit"]),
        ({"commit": "d" * 40}, ["differ in commit: c0ffee000000; dddddddddddd."]),
        ({"device": {"type": "cuda", "name": "A GPU", "threads": 2}}, ["differ in device", "A GPU (cuda)"]),
        ({"model": {**factory.about("eval")["model"], "sha256": "cd" * 32}}, ["differ in weights", "cdcdcdcdcdcd"]),
        ({"model": {**factory.about("eval")["model"], "name": "other"}}, ["differ in model: small-model; other"]),
        ({"versions": {"torch": "2.13.0"}}, ["versions of transformers"]),
    ],
)
def test_warnings(changes: dict[str, Any], words: list[str]) -> None:
    records = [record_of(factory.small(), "a.json"), record_of({**factory.sweep(4096), **changes}, "b.json")]
    told = " ".join(warnings(records))
    for word in words:
        assert word in told
    assert all(isinstance(b, Text) and b.loud for b in header(records)[1 : 1 + len(list(warnings(records)))])


def test_alike_records_are_not_warned_of() -> None:
    assert list(warnings([record_of(factory.small(), "a"), record_of(factory.fidelity(), "b")])) == []
