"""Reached or missed, and by how much."""

from __future__ import annotations

from typing import Any

import pytest

from longreach.bench.case import Case, Shape, Target
from longreach.bench.cases import CASES, tiny
from longreach.bench.targets import judge


def entry(name: str, who: str, us: float, rate: float = 0.0) -> dict[str, Any]:
    return {"name": name, "who": who, "microseconds": {"median": us}, "tb_per_s": rate}


OURS = [
    entry("contiguous", "longreach", 100.0, 4.0),
    entry("page 16", "longreach", 110.0),
    entry("1 row", "longreach", 80),
    entry("gap 350", "longreach", 50) | {"ring_percent_of_kv": 4.77},
    entry("captured step", "longreach", 60) | {"share_of_limit": 0.52},
    entry("a3 0.15", "longreach", 60) | {"settings": {"milliseconds": {"choose": 0.12}}},
]
RIVALS = [entry("A", "flashinfer", 99.0), entry("B", "flash_attention_3", 90.0), entry("C", "torch_sdpa", 10.0)]


@pytest.mark.parametrize(
    ("target", "got", "reached", "missed_by", "than"),
    [
        (Target("speed over baseline", 1.0), 0.9, False, 0.1, "B"),
        (Target("speed over baseline", 0.9), 0.9, True, 0.0, "B"),
        (Target("microseconds", 80.0), 100.0, False, 0.25, None),
        (Target("microseconds", 100.0), 100.0, True, 0.0, None),
        (Target("TB/s", 5.0), 4.0, False, 0.2, None),
        (Target("speed over", 0.93, "page 16", "contiguous"), 100 / 110, False, 1 - 100 / 110 / 0.93, "contiguous"),
        (Target("time over", 1.15, over="1 row"), 1.25, False, 0.1 / 1.15, "1 row"),
        (Target("% of KV", 4.8, "gap 350"), 4.77, True, 0.0, None),
        (Target("% of KV", 4.5, "gap 350"), 4.77, False, 0.06, None),
        (Target("share of limit", 0.65, "captured step"), 0.52, False, 0.2, None),
        (Target("ms of choosing", 0.1, "a3 0.15"), 0.12, False, 0.2, None),
    ],
)
def test_targets(target: Target, got: float, reached: bool, missed_by: float, than: str | None) -> None:
    (judged,) = judge(Case("it", "group", Shape(1, 8), targets=(target,)), OURS + RIVALS)
    assert judged["got"] == pytest.approx(got)
    assert judged["missed_by"] == pytest.approx(missed_by)
    assert (judged["reached"], judged["than"]) == (reached, than)


def test_nothing_is_judged_against_half_of_the_baselines() -> None:
    case = Case("it", "group", Shape(1, 8), targets=(Target("speed over baseline", 1.0),))
    (judged,) = judge(case, OURS + RIVALS[1:])
    assert judged["got"] is None and judged["reached"] is None


@pytest.mark.parametrize("quantity", ["time over", "speed over", "microseconds"])
def test_what_is_not_measured_yet_has_no_verdict(quantity: str) -> None:
    """A case saves its results after each way; a target of a later one must not end the run."""
    over = "1 row" if "over" in quantity else None
    case = Case("it", "group", Shape(1, 8), targets=(Target(quantity, 1.0, of="later", over=over),))
    (judged,) = judge(case, OURS + RIVALS)
    assert judged["got"] is None and judged["reached"] is None


def test_another_shape_has_no_targets() -> None:
    case = CASES["dense-128k-b1"]
    assert case.but(batch=1) is case
    assert case.but(batch=2).targets == () and case.but(batch=2).shape.batch == 2
    assert all(not tiny(c).targets for c in CASES.values())


def test_another_shape_has_a_name_of_its_own() -> None:
    """Or its time would stand in the record, and in README, as that of the case."""
    case = CASES["dense-128k-b1"].but(batch=2, dtype="float16")
    assert case.name == "dense-128k-b1 batch=2 dtype=float16"
    assert [tiny(c).name for c in CASES.values()] == list(CASES)
