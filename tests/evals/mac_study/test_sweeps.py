"""Thresholds over samples that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from longreach.evals.mac_study.head_gap_spread import head_gap_spread
from longreach.evals.mac_study.sweeps import Point, Samples, at_acceptance, at_skipped, below, layer_by_layer, point

SAMPLES = Samples(
    torch.tensor([[1.0, 4.0], [2.0, torch.inf]]), torch.tensor([[0.1, 0.4], [0.2, 0.9]]),
    torch.tensor([[0.8, 0.4], [0.6, 0.7]]),
)  # fmt: skip


def close(found: Point | None, *want: float | None) -> None:
    assert found is not None
    assert tuple(found) == tuple(None if x is None else pytest.approx(x) for x in want)


def test_a_threshold() -> None:
    close(point(SAMPLES, below(SAMPLES, 2.0)), 0.25, 0.2, 0.025, 0.1)
    close(point(SAMPLES, below(SAMPLES, 2.1)), 0.5, 0.35, 0.075, 0.15)
    close(point(SAMPLES, below(SAMPLES, 0.5)), 0.0, 0.0, 0.0, None)
    close(point(SAMPLES, below(SAMPLES, torch.tensor([[2.0], [3.0]]))), 0.5, 0.35, 0.075, 0.15)


def test_equal_acceptance() -> None:
    one = at_acceptance(SAMPLES, (0.25, 0.5, 1.0))
    close(one[0], 0.25, 0.2, 0.025, 0.1)
    close(one[1], 0.5, 0.35, 0.075, 0.15)
    close(one[2], 0.75, 0.45, 0.175, 0.7 / 3)  # the last has no row to take
    (own,) = layer_by_layer(SAMPLES, (0.5,))
    close(own, 0.5, (0.4 + 0.3) / 2, (0.05 + 0.1) / 2, 0.15)


def test_ties_are_taken_together_or_not_at_all() -> None:
    tied = Samples(torch.ones(4), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.full((4,), 0.5))
    none, every = at_acceptance(tied, (0.5, 1.0))
    close(none, 0.0, 0.0, 0.0, None)
    close(every, 1.0, 0.5, 0.25, 0.25)
    nearer = at_acceptance(tied, (0.3, 0.7))
    assert [p.accepted for p in nearer] == [0.0, 1.0]
    close(at_skipped(tied, (0.1,))[0], 1.0, 0.5, 0.25, 0.25)


def test_equal_skipped_shares() -> None:
    found = at_skipped(SAMPLES, (0.1, 0.3, 0.46))
    close(found[0], 0.25, 0.2, 0.025, 0.1)
    close(found[1], 0.5, 0.35, 0.075, 0.15)
    assert found[2] is None


def test_skew_within_a_group() -> None:
    gap = torch.tensor([[[3, 5, 10, 10], [7, 0, 0, 0], [1, 1, 4, 8]]])
    accepted = torch.tensor([[[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]]).bool()
    (found,) = head_gap_spread(gap, accepted, 2)
    assert found["average"] == pytest.approx((-7.5 - 7) / 2)
    assert found["spread"] == pytest.approx(0.5)  # the median of 1 and 0
    assert found["alike"] == pytest.approx(0.5)
    assert head_gap_spread(gap, torch.zeros_like(accepted), 2) == [{"average": None, "spread": None, "alike": None}]
