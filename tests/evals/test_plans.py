"""The plans that sessions made, in records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longreach.adapters.transformers import planned_shape
from longreach.evals.methods import parse
from longreach.evals.plans import plans_of, to_json
from longreach.evals.scores import _plans
from longreach.runtime import PlanReport, Report
from longreach.testing.tiny import tiny_model

MADE = PlanReport("kascade", "prompt", "anchors 0 4", 4096, 1.5, "/home/me/.cache/longreach/plans/kascade-1-2.json")


@pytest.mark.parametrize(
    ("method", "named"),
    [("kascade plan=auto", True), ("kascade", True), ("kascade/dense", True), ("kascade plan=p.json", False)],
)
def test_a_plan_is_named_for_the_methods_that_use_it(method: str, named: bool) -> None:
    report = Report((), plans=(MADE, replace(MADE, kind="loki")))
    assert plans_of(report, parse(method), planned_shape(tiny_model("llama"))) == ((MADE,) if named else ())


def test_records_leave_out_the_place_on_this_machine() -> None:
    (one,) = to_json([MADE, MADE])
    assert one["file"] is None and one["text"] == "kascade plan made of 4096 tokens in 1.50 s: anchors 0 4"
    assert str(MADE).endswith("kept in /home/me/.cache/longreach/plans/kascade-1-2.json")


def test_the_time_of_hashing_makes_no_other_plan() -> None:
    hashed = [replace(MADE, hash_seconds=seconds) for seconds in (1.0, 2.0)]
    (one,) = to_json(hashed)
    assert one["hash_seconds"] == 1.0 and "hashing" not in one["text"]
    assert str(hashed[1]).endswith("; hashing the weights took 2.00 s")


def test_records_of_evaluations_hold_each_plan_once() -> None:
    plan = to_json([MADE])[0]
    assert _plans([{"plans": [plan]}, {"plans": [plan]}, {}]) == {"plans": [plan]}
    assert _plans([{"plans": []}]) == {}
