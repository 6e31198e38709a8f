"""Which files a report takes, and what it says of those that it does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report.reading import load, load_all
from tests.records.report import factory


@pytest.mark.parametrize("record", [factory.small(), factory.perplexity(), factory.fidelity()], ids=lambda r: r["kind"])
def test_every_kind_is_read(tmp_path: Path, record: dict[str, Any]) -> None:
    found = load(factory.save(tmp_path, record))
    assert (found.name, found.kind, found.content) == ("record.json", record["kind"], record)
    assert found.dense == "dense" and found.lengths == [4096] and found.labels == list(factory.METHODS)


def fields(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all fields of a record but those of free form."""
    if isinstance(value, list):
        return [p for i, inner in enumerate(value[:1]) for p in fields(inner, (*path, i))]
    if not isinstance(value, dict) or path in {("config",), ("versions",)} or path[-1:] == ("facts",):
        return []
    return [p for k, inner in value.items() for p in [(*path, k), *fields(inner, (*path, k))]]


UNREAD = {"max_new_tokens", "characters", "stopped", "first_token", "window", "k"}


@pytest.mark.parametrize("record", [factory.small(), factory.perplexity(), factory.fidelity()], ids=lambda r: r["kind"])
def test_every_missing_field_is_named(tmp_path: Path, record: dict[str, Any]) -> None:
    missed = 0
    for *place, last in fields(record):
        if last in UNREAD or (len(place) == 1 and place[0] in ("tasks", "results")):
            continue  # a task or a method less is another whole record
        broken = copy.deepcopy(record)
        inside: Any = broken
        for key in place:
            inside = inside[key]
        del inside[last]
        with pytest.raises(InvalidInput) as error:
            load(factory.save(tmp_path, broken))
        told = str(error.value)
        assert "record.json" in told
        assert str(last) in told, (place, last, told)
        missed += 1
    assert missed > 20


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("model",), "mini", ["model: expected an object, got 'mini'"]),
        (("tasks",), {}, ["tasks: expected at least 1"]),
        (("tasks", "vt", "results", "dense", "score"), "1.0", ["tasks.vt.results.dense.score: expected a number"]),
        (("tasks", "vt", "results", "dense", "score"), 1.5, ["score: expected a number from 0 to 1, got 1.5"]),
        (("tasks", "vt", "results", "dense", "score"), float("nan"), ["score: expected a number from 0 to 1, got nan"]),
        (("tasks", "vt", "results", "dense", "failed"), True, ["failed: expected a whole number, got True"]),
        (("tasks", "vt", "results", "dense", "interval_95"), [0.1], ["interval_95: expected 2 items"]),
        (("tasks", "vt", "results", "dense", "answers", 0, "text"), None, ["answers[0].text: expected text, got None"]),
        (("tasks", "vt", "results", "dense", "answers", 0, "number"), 77, ["sample 77 is missing"]),
        (("methods", "extra"), factory.DENSE, ["tasks.niah_single_1.results.extra is missing"]),
        (("config", "length"), "long", ["config.length: expected a whole number"]),
    ],
)
def test_what_has_another_shape_is_named(tmp_path: Path, place: tuple[Any, ...], value: Any, words: list[str]) -> None:
    record = factory.small()
    inside: Any = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(InvalidInput) as error:
        load(factory.save(tmp_path, record))
    for word in [*words, "record.json", "longreach eval --output"]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["no JSON", "measure it again"]),
        ("[" * 100_000, ["no JSON"]),
        ("\0\xff", ["no JSON"]),
        ("[]", ["no record that names its kind", "longreach eval"]),
        ('{"kind": "bench", "format": 1}', ["kind 'bench'", "longreach perplexity", "longreach compare"]),
        ('{"kind": ["eval"], "format": 1}', ["kind ['eval']"]),
        ('{"kind": "eval", "format": 2}', ["format 2", "reads format 1", "longreach eval --output", "the version"]),
        ('{"kind": "fidelity", "format": true}', ["format True", "longreach compare --output"]),
        ('{"kind": "perplexity"}', ["format None", "longreach perplexity --output"]),
    ],
)
def test_what_is_no_record_of_this_format(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput) as error:
        load(path)
    for word in [*words, str(path)]:
        assert word in str(error.value)


def test_a_file_that_is_not_there_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot read .*gone\.json.*check the path"):
        load_all([tmp_path / "gone.json"])
    with pytest.raises(InvalidInput, match="cannot read"):
        load_all([tmp_path])
    with pytest.raises(InvalidInput, match="no records"):
        load_all([])


def test_a_file_counts_once_and_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, two = factory.save(tmp_path, factory.small()), factory.save(tmp_path / "other", factory.small())
    found = load_all([one, two, tmp_path / "other" / ".." / "record.json"])
    assert len(found) == 2 and {Path(r.name).resolve() for r in found} == {one, two}


def test_dense_may_be_missing(tmp_path: Path) -> None:
    methods = {k: v for k, v in factory.METHODS.items() if k != "dense"}
    record = factory.perplexity(methods)
    assert load(factory.save(tmp_path, json.loads(json.dumps(record)))).dense is None
