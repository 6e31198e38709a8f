"""A3Deep's plan: the layer that it says, read back from a file, and checked against the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.methods.call import ModelShape
from longreach.methods.fusion import A3Deep
from longreach.methods.fusion.plan import KIND, A3DeepPlan
from longreach.methods.registry import choose_fusion
from longreach.plans import Plan, PlannedModel, load
from tests.methods.planned import MADE, changed

SHAPE = ModelShape(layers=12, query_heads=4, kv_heads=2, head_dim=16, config="c0ffee" * 10)
VIEW = A3DeepPlan(7, (2, 7, 11), 0.15, (0.3, 0.1, 0.2), (0.4, 0.5, 1.0))


def plan(**changes: Any) -> Plan:
    return replace(Plan(KIND, PlannedModel.of("of the tests", SHAPE), VIEW.values(), MADE), **changes)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    plan().save(tmp_path / "p.json")
    return str(tmp_path / "p.json")


def test_the_plan_says_the_layer(saved: str) -> None:
    assert A3DeepPlan.of(load(saved, KIND)) == VIEW
    method = A3Deep(plan=saved, rounds=2)
    method.check(SHAPE)
    assert method.probes(SHAPE) == (7, 7)
    fields = json.loads(json.dumps(method.to_json()))
    assert choose_fusion(fields.pop("name"), **fields) == method


def test_a_plan_of_another_model_or_kind_is_refused(saved: str, tmp_path: Path) -> None:
    other = replace(SHAPE, config="beef" * 15)
    with pytest.raises(InvalidInput, match=r"the plan .*p.json is for of the tests.*longreach calibrate a3_deep --mod"):
        A3Deep(plan=saved).check(other)
    path = tmp_path / "loki.json"
    Plan("loki", PlannedModel.of("of the tests", SHAPE), {}, MADE).save(path)
    with pytest.raises(InvalidInput, match="expected a plan for a3_deep, got one for 'loki'"):
        A3Deep(plan=str(path)).check(SHAPE)
    with pytest.raises(InvalidInput, match=r"no plan 'none\.json'"):
        A3Deep(plan="none.json").check(SHAPE)


def test_a_layer_and_a_plan_do_not_go_together() -> None:
    with pytest.raises(
        InvalidInput, match=r"layer=3 and plan='p\.json': the plan sets the layer; give only one of the two"
    ):
        A3Deep(layer=3, plan="p.json")
    with pytest.raises(InvalidInput, match="plan: expected a file"):
        A3Deep(plan="")


def test_the_least_mean_divergence_chooses_and_the_lower_layer_of_equals() -> None:
    parts = [{"kl": [0.5, 0.1, 0.4, 0.3], "hits": [0.0, 1.0, 0.5, 0.5]},
             {"kl": [0.5, 0.5, 0.2, 0.3], "hits": [0.5, 0.0, 0.5, 1.0]}]  # fmt: skip
    found = A3DeepPlan.of_parts(parts, (0, 3, 5, 6), 0.2)
    assert found.layer == 3 and found.ratio == 0.2 and found.layers == (0, 3, 5, 6)
    assert found.kl == pytest.approx((0.5, 0.3, 0.3, 0.3)) and found.hits == pytest.approx((0.25, 0.5, 0.5, 0.75))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layer", None, "lacks the value 'layer'"),
        ("hits", None, "lacks the value 'hits'"),
        ("layer", lambda x: 3, "layer: expected one of 2, 7, 11, got 3"),
        ("layer", lambda x: True, "layer: expected one of"),
        ("layers", lambda x: [7, 2, 11], "layers: expected ascending layer numbers"),
        ("layers", lambda x: [2, 7, 12], "layers: expected layers from 0 to 11, got 12"),
        ("layers", lambda x: [], "layers: expected ascending"),
        ("layers", lambda x: "2", "layers: expected a list"),
        ("ratio", lambda x: 1.5, r"ratio: expected a number in \[0, 1\], got 1.5"),
        ("kl", lambda x: [0.1, -0.1, 0.2], "kl: expected 3 numbers in"),
        ("kl", lambda x: [0.1, 0.2], "kl: expected 3 numbers in"),
        ("hits", lambda x: [0.1, 0.2, 1.2], r"hits: expected 3 numbers in \[0, 1\]"),
    ],
)
def test_broken_values(name: str, change: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        A3DeepPlan.of(plan(values=changed(VIEW.values(), name, change)))
