"""What committed records show, beside what README is written from."""

from __future__ import annotations

import re
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


def test_records_named_by_the_performance_log_exist() -> None:
    page = (RESULTS.parents[1] / "docs/performance.md").read_text()
    cited = [re.findall(r"`([^`]*)`", part) for part in re.findall(r"\(([^()]*)\)", page)]
    names = {name for some in cited if all(re.fullmatch("[a-z0-9-]+", x) for x in some) for name in some}
    assert len(names) > 10 and {f"{name}.json" for name in names} <= {path.name for path in RESULTS.iterdir()}
