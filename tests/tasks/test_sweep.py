"""The sweep: depths in order, the needle where it is said to be."""

from __future__ import annotations

import pytest
from tests.tasks.counts import made

from longreach.tasks.sweep import Sweep


def test_the_sweep_goes_through_depths_in_order() -> None:
    task = Sweep()
    depths = [task.at(n, 5, seed=3).depth for n in range(5)]
    assert depths == [0, 0.25, 0.5, 0.75, 1] and task.at(0, 1, seed=3).depth == 0.5
    for n in range(5):
        sample = made(task.at(n, 5, seed=3), seed=n)
        assert sample.context.count(sample.answers[0]) == 1
        spot = sample.context.index(sample.answers[0]) / len(sample.context)
        assert spot == pytest.approx(depths[n], abs=0.05) and sample.facts["depth"] == depths[n]
