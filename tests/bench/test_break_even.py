"""The context from which Kascade is faster, of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longreach.bench.break_even import Compared, break_even, compare
from longreach.methods.kascade import Kascade
from longreach.methods.kascade import method as kascade
from longreach.plans import load
from tests.methods.kascade.planned import planned


def measured(*kascade_over_dense: float) -> list[Compared]:
    return [Compared(100 << n, time, 1.0) for n, time in enumerate(kascade_over_dense)]


@pytest.mark.parametrize(
    ("times", "tokens"),
    [
        ((2, 1.5, 0.9, 0.5), 400),
        ((2, 0.9, 1.1, 0.5), 800),  # faster at every longer one: a lucky shorter one does not count
        ((0.9, 0.5), 0),
        ((2, 1.5, 1.0), 401),
        ((0.5, 1.2), 201),
        ((3,), 101),
    ],
)
def test_the_least_context_from_which_kascade_stays_faster(times: tuple[float, ...], tokens: int) -> None:
    assert break_even(measured(*times)) == tokens


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_both_sides_run_in_the_plans_layers(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are left out; Kascade chooses, whatever the plan has as break-even of this device."""
    path = planned(tmp_path, (1,), layers=(1, 2), dense_below={"decode": 1000, "prefill": 1000})
    plain, ran = Kascade.run, list[int]()

    def run(self: Kascade, call: kascade.LayerCall, state: kascade.SequenceState | None) -> kascade.Outcome:
        found = plain(self, call, state)
        ran.append(call.layer)
        assert call.phase == phase and (call.layer == 1 or found.dense_reason is None)
        return found

    monkeypatch.setattr(Kascade, "run", run)
    one = compare(load(Path(path), "kascade"), Path(path), phase, 300, torch.device("cpu"))  # type: ignore[arg-type]
    assert one.context == 300 and one.kascade > 0 and one.dense > 0 and set(ran) == {1, 2}
