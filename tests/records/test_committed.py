"""What committed records show, beside what README is written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longreach.records.record import read

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def without_times(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: without_times(value) for key, value in x.items() if key != "seconds"}
    return [without_times(value) for value in x] if isinstance(x, list) else x


def test_the_same_command_gave_the_same_record_twice_but_for_times() -> None:
    once, twice = (read(RESULTS / f"mini-dense-{name}.json.gz") for name in ("once", "twice"))
    assert once != twice  # two runs: times differ
    assert without_times(once) == without_times(twice)
    assert len(once["tasks"]) == 14 and {len(task["samples"]) for task in once["tasks"].values()} == {20}
