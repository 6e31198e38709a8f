"""Records that no longer speak for the code are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records import write
from longreach.records.kernels import PACKAGE, kernels
from longreach.records.launches import Launch
from longreach.records.sources import source_hash
from longreach.records.stale import stale
from longreach.records.weights import weights_sha256

CLEAN: dict[str, Any] = {"commit": "a" * 40, "dirty": False}
SOURCE = {"chunk_store": source_hash("chunk_store")}


def bench(**cases: Any) -> dict[str, Any]:
    return {"kind": "bench", "format": 1, "group": "g", "cases": cases}


def launch(**changes: Any) -> dict[str, Any]:
    """A launch as a record holds it, of a kernel as it is now."""
    (place,) = [place for place in kernels() if place[1] == "append_rows"]
    made = Launch("append_rows", place[0], kernels()[place], {"D": 128}, 4, 3, (8,)).to_json()
    return {**made, **changes}


def entry(*launches: dict[str, Any], who: str = "longreach") -> dict[str, Any]:
    return {"who": who, "name": "it", "launched": {"kernels": None, "triton": list(launches), "device": None}}


def case(*launches: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**CLEAN, "entries": [entry(*launches)], **changes}


def test_clean_and_current_records_pass(tmp_path: Path) -> None:
    write(tmp_path / "a.json", CLEAN)
    write(tmp_path / "b.json", bench(it=case(launch()), store={**CLEAN, "sources": SOURCE}))
    shipped = weights_sha256(PACKAGE / "models/longreach-mini")
    write(tmp_path / "c.json.gz", {**CLEAN, "kind": "eval", "model": {"name": "longreach-mini", "sha256": shipped}})
    write(tmp_path / "d.json", {**CLEAN, "kind": "eval", "model": {"name": "another", "sha256": "0"}})
    write(tmp_path / "e.json", bench(it={**CLEAN, "entries": [], "left_out": {"longreach.generate": "out of memory"}}))
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
        ({"sources": {"chunk_store": "0" * 64}}, "the sources of chunk_store have changed"),
        ({"sources": {"chunk_stores": "0" * 64}}, "does not exist in this version"),
        ({"entries": [entry(launch(sha256="0" * 64))]}, "kernel append_rows (ops/append/"),
        ({"entries": [entry(launch(sha256="0" * 64, kernel="attendd"))]}, "no longer exists"),
        (
            {"entries": [entry(launch()), {"who": "longreach", "name": "b"}]},
            "does not hold what was launched, so changes",
        ),
        ({"entries": [entry({"kernel": "append_rows"})]}, "cannot be read"),
        ({"entries": [], "kernels": {"attend": "0"}}, "before records held what was launched; confirm its group"),
    ],
)
def test_each_fault_is_named_with_its_case(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    good = case(launch())
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
        ('{"commit": "a", "sources": [1]}', "", "does not exist in this version"),
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


@pytest.mark.parametrize("changes", [{"file": "ops/elsewhere/triton_kernels.py"}, {"kernel": "append_all_rows"}])
def test_a_kernel_that_moved_and_is_the_same_is_not_stale(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path / "a.json", bench(it=case(launch(**changes))))
    assert stale(tmp_path) == []


def test_kernels_of_other_libraries_and_of_rivals_are_not_compared(tmp_path: Path) -> None:
    foreign = launch(kernel="flash.fwd", file=None, sha256=None)
    rival = entry(launch(sha256="0" * 64), who="flashinfer")
    write(tmp_path / "a.json", bench(it={**CLEAN, "entries": [entry(foreign), rival]}))
    assert stale(tmp_path) == []


def test_cases_that_were_carried_over_count_by_the_spot_case(tmp_path: Path) -> None:
    old = {**CLEAN, "carried_over": True, "entries": [{"who": "longreach", "name": "it"}]}
    confirmed = {"commit": "b" * 40, "dirty": False, "cases": {"spot": {}}}
    record = bench(spot={**case(launch()), "carried_over": True}, other=old)
    write(tmp_path / "a.json", {**record, "confirmed": confirmed})
    assert stale(tmp_path) == []
    write(tmp_path / "a.json", {**record, "confirmed": {**confirmed, "dirty": True}})
    assert [(fault.part, "confirmed from a dirty tree" in fault.why) for fault in stale(tmp_path)] == [
        ("spot", True), ("other", True),
    ]  # fmt: skip
    record["cases"]["spot"] = {**case(launch(sha256="0" * 64)), "carried_over": True}
    write(tmp_path / "a.json", {**record, "confirmed": confirmed})
    assert [(fault.part, "has changed since" in fault.why) for fault in stale(tmp_path)] == [
        ("spot", True), ("other", True),
    ]  # fmt: skip
    write(tmp_path / "a.json", record)
    assert {fault.part for fault in stale(tmp_path) if "record no longer holds" in fault.why} == {"spot", "other"}
