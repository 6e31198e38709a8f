"""What is no bench record is refused, not tripped over."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from longreach.bench.case import Target
from longreach.bench.cases import CASES
from longreach.bench.record import add, read
from longreach.bench.spot import compare
from longreach.errors import InvalidInput
from longreach.records import write

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"kind": "eval"}', '{"kind": "bench", "format": 1}', '{"kind":"bench","format":1,"cases":[1]}']
)
def test_what_is_no_bench_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"a\.json is no .*record"):
        read(path)
    with pytest.raises(InvalidInput, match=r"a\.json is no .*record"):
        add(path, "g", "c", {})
    assert path.read_text() == text


def test_a_case_measured_again_replaces_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for case, result in (("one", {"n": 1}), ("two", {"n": 2}), ("one", {"n": 3})):
        add(path, "g", case, result)
    assert read(path)["cases"] == {"one": {"n": 3}, "two": {"n": 2}}


def test_a_case_measured_again_is_no_longer_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for case in ("one", "two", "three"):
        add(path, "g", case, {})
    write(path, {**read(path), "confirmed": {"commit": "c", "cases": {"one": {}, "two": {}}}})
    found = []
    for case in ("three", "one", "two"):
        add(path, "g", case, {"n": 1})
        found.append(read(path).get("confirmed"))
    one_and_two, two = ({"commit": "c", "cases": {name: {} for name in names}} for names in (("one", "two"), ("two",)))
    assert found == [one_and_two, two, None]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_records_are_confirmed_for_the_numbers_they_hold(path: Path) -> None:
    record: dict[str, Any] = json.loads(path.read_text())
    for case, entries in record.get("confirmed", {"cases": {}})["cases"].items():
        measured = record["cases"][case]
        then = {name: compared.then for name, compared in compare(case, measured, measured).entries.items()}
        assert then == pytest.approx({name: entry["then"] for name, entry in entries.items()}), case


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_records_are_judged_by_todays_targets(path: Path) -> None:
    record: dict[str, Any] = json.loads(path.read_text())
    known = record.get("cases", {}) if record.get("kind") == "bench" else {}
    for name in CASES.keys() & known.keys():
        now = [asdict(target) for target in CASES[name].targets]
        then = [
            {key: target[key] for key in asdict(Target("", 0.0, ""))} for target in record["cases"][name]["targets"]
        ]
        assert then == now, name
