"""What docs/plans.md says of the anchors that `fewest` finds for longreach-mini, from committed plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from longreach.methods.kascade.anchors import fewest
from longreach.methods.kascade.calibration_result import SERVED, CalibrationResult
from longreach.plans import load, shipped

PROSE = Path(__file__).parents[2] / "benchmarks" / "plans" / "kascade-mini-prose-0-6.json"


def anchors(path: Path, served: float, weighted: bool = False) -> tuple[int, ...]:
    found = replace(CalibrationResult.of(load(path, "kascade")), weighted=weighted)
    return fewest(found.similarity, found.plain, served).anchors


@pytest.mark.parametrize("served", [0.5, 0.55, SERVED, 0.64])
@pytest.mark.parametrize("weighted", [False, True])
def test_with_prompts_of_tasks(served: float, weighted: bool) -> None:
    path = shipped("kascade")["kascade-longreach-mini"]
    found = anchors(path, served, weighted)
    assert (found == (0, 4, 8)) is not (weighted and served < 0.55)
    assert len(anchors(path, 0.65, weighted)) == 5


def test_with_prose_alone() -> None:
    assert anchors(PROSE, SERVED) == (0, 8) and anchors(PROSE, 0.65) == (0, 4, 8)
