"""The picture: which lines and bands it has; that it is drawn whatever a log holds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiers import swept
from tests.train.mini.card.conftest import FIRST, LAST, log

from longreach.train.mini.card.inputs import TrainingRun
from longreach.train.mini.card.plot import accuracies, bands, loss_png, medians
from longreach.train.mini.checkpoint import Trained


def runs(**more: Any) -> list[TrainingRun]:
    first, second = log(Trained(), FIRST, (512, 512), False, **more), log(FIRST, LAST, (1024, 512), True, **more)
    return [TrainingRun("run 1", first, Trained(), FIRST), TrainingRun("run 2", second, FIRST, LAST)]


def test_bands_of_one_length_meet() -> None:
    points = [{"tokens": n, "lengths": [length, 512]} for n, length in ((10, 512), (20, 512), (30, 2048), (40, 512))]
    assert bands(points, 45) == [(0, 20, 512), (20, 30, 2048), (30, 45, 512)]


def test_medians() -> None:
    assert medians([1, 9, 2, 3, 100], 3) == [5, 2, 3, 3, 51.5] and medians([4, 5], 1) == [4, 5]


def test_lines_of_all_runs() -> None:
    forms = accuracies(runs())
    assert [(what, len(x), set(y)) for what, x, y in forms] == [("needles", 20, {0.75}), ("tracing", 20, {0.5})]
    assert forms[0][1][-1] == LAST.tokens
    by_length = [{"step": 5, "seconds": 1, "tokens": 7, "exact": {"512": 0.5, "1024": 1.0}}]
    assert accuracies(runs(dev=by_length)) == [("512 tokens", [7, 7], [0.5, 0.5]), ("1024 tokens", [7, 7], [1.0, 1.0])]
    by_form = [{"step": 5, "seconds": 1, "tokens": 7, "exact": {"needles": {"512": 0.5, "1024": 1.0}, "plan": {}}}]
    assert accuracies(runs(dev=by_form)) == [("needles", [7, 7], [0.75, 0.75])]


@pytest.mark.parametrize("answer", swept([float("nan"), 0.5, 0.0], 1))
def test_it_is_drawn(answer: float) -> None:
    found = runs()
    for run in found:
        for point in run.curve:
            point["answer"] = answer
            point.pop("forms")
    assert loss_png(found).startswith(b"\x89PNG")
    assert loss_png(found) == loss_png(found)
    assert len(loss_png(runs())) > len(loss_png(found[:1]))


def test_points_without_plain_text_are_drawn_over() -> None:
    found = runs()
    for point in found[0].curve[3:]:
        point.pop("text")
    assert loss_png(found).startswith(b"\x89PNG")
