"""Spot checks: what confirms a record, what does not, and what is carried over."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from longreach.bench.cases import CASES, GROUPS, SPOTS
from longreach.bench.spot import WITHIN, compare, confirmed, repeated
from longreach.records.launches import Launch, Launched

ONE = Launch("look", "ops/a/triton.py", "1" * 64, {"D": 128}, 4, 3, (8,))
NOW = {"commit": "b" * 40, "dirty": False, "versions": {"torch": "2"}, "device": {"name": "abacus"}, "python": "3"}


def entry(name: str, us: float, who: str = "longreach", launch: Launch | None = ONE, **settings: Any) -> dict[str, Any]:
    launched = None if launch is None else Launched((launch,)).to_json()
    return {"name": name, "who": who, "microseconds": {"median": us}, "launched": launched, "settings": settings}


def measured(ours: float = 10.0, rival: float | None = 20.0, launch: Launch | None = ONE) -> dict[str, Any]:
    entries = [entry("contiguous", ours, launch=launch)]
    if rival is not None:
        entries += [entry("fast", rival, "rival", None, page=16), entry("slow", 2 * rival, "rival", None, page=64)]
    return {"entries": entries, "commit": "a" * 40}


def old(ours: float = 10.0) -> dict[str, Any]:
    """A case from before records held launches."""
    case = measured(ours)
    for one in case["entries"]:
        del one["launched"]
    return {**case, "kernels": {"attend": "0"}}


@pytest.mark.parametrize(
    ("then", "now", "off"),
    [
        (measured(10, 20), measured(20, 40), 0.0),  # a slower machine
        (measured(10, 20), measured(10.3, 20), 1 / 1.03 - 1),
        (measured(10, 20), measured(9, 20), 1 / 0.9 - 1),
        (measured(10, None), measured(10.2, 20), 0.02),  # no rival then: times
        (measured(10, 20), measured(10.4, None), 0.04),  # no rival now
    ],
)
def test_speed_is_compared_as_a_ratio_where_it_can_be(then: dict[str, Any], now: dict[str, Any], off: float) -> None:
    found = compare("it", then, now).entries["contiguous"]
    assert found.off == pytest.approx(off) and found.confirmed == (abs(off) <= WITHIN)
    with_rival = len(then["entries"]) > 1 < len(now["entries"])
    assert found.against == ("fast" if with_rival else None)


def test_the_bound_is_three_percent() -> None:
    assert compare("it", measured(100, None), measured(102.9, None)).confirmed
    assert not compare("it", measured(100, None), measured(103.1, None)).confirmed
    assert not compare("it", measured(100, None), measured(96.9, None)).confirmed  # faster: to be measured again too


def test_other_launches_and_missing_entries_are_faults() -> None:
    other = Launch("look", "ops/a/triton.py", "1" * 64, {"D": 128}, 8, 3, (8,))
    spot = compare("it", measured(), measured(launch=other))
    assert not spot.confirmed and any("warps 8" in fault for fault in spot.faults)
    assert any("contiguous has other launches" in line for line in spot.lines())
    assert "were not observed" in compare("it", measured(), measured(launch=None)).faults[0]
    gone = compare("it", measured(), {"entries": [entry("paged", 10)]})
    assert gone.faults == ("contiguous is no longer measured by this case",) and not gone.confirmed


def test_the_baselines_are_those_of_the_record() -> None:
    case = repeated(CASES["dense-32k-b1"], measured())
    assert case.rivals == {"rival": [{"page": 16}, {"page": 64}]}


def test_old_cases_are_carried_over_with_the_launches_of_the_spot() -> None:
    record = {"kind": "bench", "group": "g", "cases": {"spot": old(), "other": old(), "later": measured()}}
    before = deepcopy(record)
    now = measured()
    written = confirmed(record, [compare("spot", record["cases"]["spot"], now)], {"spot": now}, NOW)
    assert record == before
    spot, other, later = (written["cases"][name] for name in ("spot", "other", "later"))
    assert "kernels" not in spot and spot["carried_over"] and spot["commit"] == "a" * 40
    assert spot["entries"][0]["launched"] == now["entries"][0]["launched"]
    assert spot["entries"][0]["microseconds"] == {"median": 10.0}
    assert "kernels" not in other and other["carried_over"] and "launched" not in other["entries"][0]
    assert later == measured()
    assert written["confirmed"] == {
        "commit": "b" * 40, "dirty": False, "versions": {"torch": "2"}, "device": {"name": "abacus"}, "within": WITHIN,
        "cases": {"spot": {"contiguous": {"then": 2.0, "now": 2.0, "off": 0.0, "against": "fast"}}},
    }  # fmt: skip


def test_every_group_has_spot_cases_of_its_own() -> None:
    assert set(SPOTS) == set(GROUPS)
    assert all(CASES[name].group == group for group, names in SPOTS.items() for name in names)
