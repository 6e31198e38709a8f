"""Launches in records: read back as written, compared by what runs, not by names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longreach.records.launches import Launch, Launched, outdated, together

ONE = Launch("look", "ops/a/triton.py", "1" * 64, {"D": 128, "form": "(1, 2)", "none": None}, 4, 3, (8, 2))
TWO = replace(ONE, kernel="settle", sha256="2" * 64)


def test_what_is_written_is_read_back() -> None:
    launched = Launched((replace(ONE, times=3), TWO), {"look": 3, "settle": 1, "memset": 2})
    assert Launched.from_json(json.loads(json.dumps(launched.to_json()))) == launched
    assert launched.count == launched.to_json()["kernels"] == 6 and Launched((ONE,)).count is None
    with pytest.raises(TypeError):
        Launch.from_json({**ONE.to_json(), "more": 1})
    with pytest.raises(KeyError):
        Launched.from_json({"triton": []})


def test_equal_launches_are_one() -> None:
    assert together([ONE, TWO, ONE]) == (replace(ONE, times=2), TWO)


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "3" * 64},
        {"constants": {**ONE.constants, "D": 64}},
        {"warps": 8},
        {"stages": 2},
        {"grid": (9, 2)},
        {"options": {"launch_pdl": True}},
        {"times": 2},
    ],
)
def test_what_changes_a_launch_is_named(change: dict[str, object]) -> None:
    found = Launched((ONE, TWO)).differences(Launched((replace(ONE, **change), TWO)))  # type: ignore[arg-type]
    assert found and all(line.startswith("look: ") and "before" in line for line in found)


def test_names_places_and_order_do_not_count() -> None:
    moved = replace(ONE, kernel="search", file="ops/b/triton.py")
    assert Launched((ONE, TWO)).differences(Launched((TWO, moved))) == []


def test_kernels_without_a_source_are_compared_by_name_where_both_runs_saw_them() -> None:
    before = Launched((ONE,), {"look": 1, "gemm": 2})
    assert before.differences(Launched((ONE,), {"look": 1, "gemm": 3})) == ["gemm: 2 before, 3 now"]
    assert before.differences(Launched((ONE,), {"look": 7, "gemm": 2})) == []  # Triton's are compared above
    assert before.differences(Launched((ONE,), None)) == []


def test_outdated_kernels_are_named_once() -> None:
    foreign = replace(ONE, file=None, sha256=None)
    gone = replace(ONE, kernel="no_such_kernel")
    changed = replace(ONE, kernel="append_rows", file="ops/append/triton_kernels.py")
    assert list(outdated([changed, replace(changed, warps=8), gone, foreign])) == [
        "kernel append_rows (ops/append/triton_kernels.py) has changed since",
        "kernel no_such_kernel (ops/a/triton.py) no longer exists",
    ]
