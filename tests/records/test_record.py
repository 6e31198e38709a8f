"""Records: whole or not at all, with where they come from."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from random import Random

import pytest

from longreach.errors import InvalidInput
from longreach.records import bootstrap, environment, wilson, write
from longreach.records.record import files, read


def test_a_record_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    write(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_a_record_may_be_compressed(tmp_path: Path) -> None:
    path, again = tmp_path / "record.json.gz", tmp_path / "deep" / "again.json.gz"
    record = {"answers": ["the same words"] * 1000}
    write(path, record)
    write(again, record)
    assert read(path) == record
    assert path.read_bytes() == again.read_bytes() and path.stat().st_size < 1000
    assert files(tmp_path) == [again, path]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not whole"):
        read(path)


def test_an_unwritable_place_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot write"):
        write(tmp_path / "file" / "record.json", {})


def test_the_environment_names_versions_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREACH_COMMIT", "abc123+dirty")
    found = environment("cpu")
    assert (found["commit"], found["dirty"]) == ("abc123", True)
    assert {"torch", "transformers", "tokenizers", "numpy"} <= set(found["versions"])
    assert found["device"]["type"] == "cpu" and found["device"]["name"]


def test_bootstrap_interval() -> None:
    draw = Random(1)
    values = [draw.gauss(5.0, 2.0) for _ in range(400)]
    low, high = bootstrap(values) or (0, 0)
    mean, half = sum(values) / 400, 1.96 * statistics.stdev(values) / 20
    assert (low, high) == (pytest.approx(mean - half, abs=0.03), pytest.approx(mean + half, abs=0.03))
    assert bootstrap(values) == [low, high]
    assert bootstrap([1.0]) is None and bootstrap([1.0, float("inf")]) is None and bootstrap([2.0, 2.0]) == [2.0, 2.0]


def test_wilson_interval() -> None:
    # Wilson (1927) for 90 of 100 at 95%: 0.8256 to 0.9448
    low, high = wilson(90, 100)
    assert low == pytest.approx(0.8256, abs=1e-4) and high == pytest.approx(0.9448, abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    for total in range(1, 300):
        all_right, none_right = wilson(total, total), wilson(0, total)
        assert all_right[1] == 1.0 and none_right[0] == 0.0
        assert all_right[0] == pytest.approx(total / (total + 1.96**2))
        assert none_right[1] == pytest.approx(1 - all_right[0])
