"""What Loki takes from a plan, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.methods.call import ModelShape
from longreach.methods.loki import Loki
from longreach.methods.loki.plan import LokiPlan
from longreach.plans import load
from tests.methods.drive import MODEL
from tests.methods.planned import changed, loki_plan


def test_it_comes_back_from_a_file(tmp_path: Path) -> None:
    plan = loki_plan(MODEL)
    plan.save(tmp_path / "p.json")
    before, after = LokiPlan.of(plan), LokiPlan.of(load(tmp_path / "p.json", "loki"))
    assert torch.equal(before.basis, after.basis) and torch.equal(before.variance, after.variance)
    Loki(plan=str(tmp_path / "p.json")).check(MODEL)


def test_how_much_the_first_directions_explain() -> None:
    found = LokiPlan.of(loki_plan(MODEL))
    shares = [found.explained(rank) for rank in (1, 4, 16)]
    assert bool((shares[0] < shares[1]).all()) and torch.allclose(shares[2], torch.ones(3, 2))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("basis", lambda x: x[0], r"basis: expected float \[L, G, D, D\]"),
        ("basis", lambda x: x[..., :4], r"basis: expected float \[L, G, D, D\]"),
        ("basis", lambda x: x.int(), "basis: expected float"),
        ("basis", lambda x: x * 2, "basis: expected unit vectors, got lengths off by 1"),
        ("basis", lambda x: x[:, :1], r"variance: expected float \[3, 1, 16\]"),
        ("variance", lambda x: x.flip(-1), "variance: expected numbers >= 0 that fall"),
        ("variance", lambda x: x - 100, "variance: expected numbers >= 0 that fall"),
        ("variance", lambda x: x[:2], r"variance: expected float \[3, 2, 16\]"),
        ("basis", None, "the plan lacks the array 'basis'"),
        ("variance", None, "the plan lacks the array 'variance'"),
    ],
)
def test_broken_plans(name: str, change: Callable[[Tensor], Tensor] | None, complaint: str) -> None:
    plan = loki_plan(MODEL)
    with pytest.raises(InvalidInput, match=complaint):
        LokiPlan.of(replace(plan, arrays=changed(plan.arrays, name, change)))


def test_other_models() -> None:
    plan = loki_plan(MODEL)
    with pytest.raises(InvalidInput, match=r"basis: expected \[4, 2, 16\] x D"):
        LokiPlan.of(replace(plan, model=replace(plan.model, layers=4)))
    with pytest.raises(InvalidInput, match="expected a plan for loki, got one for kascade"):
        LokiPlan.of(replace(plan, kind="kascade"))
    with pytest.raises(InvalidInput, match=r"no loki plan is shipped for this model .* longreach calibrate loki"):
        Loki().check(ModelShape(3, 4, 2, 16, config="another's"))


def test_options_are_held_against_the_model() -> None:
    with pytest.raises(InvalidInput, match="rank: expected at most the head dim, 16, got 17"):
        Loki(rank=17).check(MODEL)
    with pytest.raises(InvalidInput, match=r"dense_layers: .* has 3 \(0 to 2\), got layer 3"):
        Loki(dense_layers=(3,)).check(MODEL)
    with pytest.raises(InvalidInput, match=r"no plan 'nowhere\.json'"):
        Loki(plan="nowhere.json").check(MODEL)
