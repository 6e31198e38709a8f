"""Records that no longer speak for the code are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records import write
from longreach.records.kernels import PACKAGE, kernel_hash
from longreach.records.stale import stale
from longreach.records.weights import weights_sha256

CLEAN: dict[str, Any] = {"commit": "a" * 40, "dirty": False}


def bench(**cases: Any) -> dict[str, Any]:
    return {"kind": "bench", "format": 1, "group": "g", "cases": cases}


def test_clean_and_current_records_pass(tmp_path: Path) -> None:
    write(tmp_path / "a.json", CLEAN)
    write(tmp_path / "b.json", bench(it={**CLEAN, "kernels": {"attend": kernel_hash("attend")}}))
    shipped = weights_sha256(PACKAGE / "models/longreach-mini")
    write(tmp_path / "c.json.gz", {**CLEAN, "kind": "eval", "model": {"name": "longreach-mini", "sha256": shipped}})
    write(tmp_path / "d.json", {**CLEAN, "kind": "eval", "model": {"name": "another", "sha256": "0"}})
    assert stale(tmp_path) == []


def test_answers_of_other_weights_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a.json.gz", {**CLEAN, "kind": "eval", "model": {"name": "longreach-mini", "sha256": "0"}})
    (fault,) = stale(tmp_path)
    assert fault.path.name == "a.json.gz" and "other weights" in fault.why


def test_a_record_without_a_commit_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"curve": []})
    (fault,) = stale(tmp_path)
    assert "names no commit" in fault.why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dirty": True}, "dirty tree"),
        ({"commit": None}, "no commit"),
        ({"kernels": {"attend": "0" * 64}}, "have changed"),
    ],
)
def test_each_fault_is_named_with_its_case(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    good = {**CLEAN, "kernels": {"attend": kernel_hash("attend")}}
    write(tmp_path / "a.json", bench(good=good, bad={**good, **changes}))
    (fault,) = stale(tmp_path)
    assert fault.part == "bad" and why in fault.why


@pytest.mark.parametrize(
    ("text", "part", "why"),
    [
        ("{", "", "is no JSON"),
        ("[]", "", "is no record"),
        ('{"kind": "bench"}', "", "expected its cases by name"),
        ('{"kind": "bench", "cases": [1]}', "", "expected its cases by name"),
        ('{"kind": "bench", "cases": {"it": 1}}', "it", "is no measurement"),
        ('{"kind": "bench", "cases": {"it": {}}}', "it", "is no measurement"),
        ('{"kind": "bench", "cases": {"it": {"commit": "a", "kernels": {}}}}', "it", "is no measurement"),
        ('{"kind": "bench", "cases": {"it": {"commit": "a", "kernels": {"warp": "0"}}}}', "it", "does not know"),
        ('{"commit": "a", "kernels": [1]}', "", "does not know"),
        ('{"commit": 7}', "", "names no commit"),
    ],
)
def test_what_is_no_record_is_a_fault_and_hides_no_other(tmp_path: Path, text: str, part: str, why: str) -> None:
    (tmp_path / "a.json").write_text(text)
    write(tmp_path / "b.json", {**CLEAN, "dirty": True})
    one, other = stale(tmp_path)
    assert (one.path.name, one.part) == ("a.json", part) and why in one.why
    assert other.path.name == "b.json"


def test_records_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no folder"):
        stale(tmp_path / "missing")
