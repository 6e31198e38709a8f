"""Timing's arithmetic and order; graphs are timed on a GPU only."""

from __future__ import annotations

import pytest
import torch

from longreach.bench.timing import Timing, copies_needed, measure
from longreach.errors import InvalidInput
from longreach.records.launches import Launched

CPU = torch.device("cpu")


def test_quartiles_of_a_known_sample() -> None:
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0], calls=7, how="test")
    assert (timing.first_quartile, timing.median, timing.third_quartile) == (2.0, 3.0, 4.0)
    assert (timing.calls, timing.replays) == (7, 5)


def test_every_replay_is_recorded_in_its_order() -> None:
    timing = Timing.of([5e-6, 1e-6, 3e-6, 2e-6], calls=7, how="test", launched=Launched((), {"a": 2}))
    recorded = timing.recorded(parts=2)
    assert recorded["microseconds"]["replays"] == [2.5, 0.5, 1.5, 1.0]
    assert recorded["microseconds"]["median"] == pytest.approx(1.25) and recorded["calls_per_replay"] == 7
    assert recorded["launched"] == {"kernels": 2, "triton": [], "device": {"a": 2}}
    assert Timing.of([1.0, 2.0], calls=1, how="test").recorded()["launched"] is None


def test_every_copy_is_called_in_turn() -> None:
    called: list[int] = []
    calls = [lambda n=n: called.append(n) for n in range(3)]
    timing = measure({"it": calls}, CPU, replays=4, warm_up=2)["it"]
    assert called == [0, 1, 2, 0, 1, 2]
    assert timing.replays == 4 and "functional" in timing.how


def test_too_few_replays_and_no_calls_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 2 replays"):
        measure({"it": [lambda: None]}, CPU, replays=1)
    with pytest.raises(InvalidInput, match="a call of each"):
        measure({"it": []}, CPU)


def test_copies_together_exceed_three_times_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.bench.timing.l2_bytes", lambda device: 100)
    assert copies_needed(10, CPU) * 10 >= 300 > (copies_needed(10, CPU) - 1) * 10
    assert copies_needed(301, CPU) == 1
