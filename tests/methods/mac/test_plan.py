"""MAC's view of a plan: what it says, what each option takes from it, and every way in which it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.call import LayerCall
from longreach.methods.mac import MAC
from longreach.methods.mac.plan import MACPlan
from longreach.methods.mac.state import LayerState
from longreach.ops import HeadShard
from longreach.plans import Plan, load
from longreach.runtime import StateStore
from tests.methods.drive import DIM, KV_HEADS, LAYERS, MODEL, SCALE, Turn, in_phase, new_cache, read_text, run, text
from tests.methods.metered import metadata_of
from tests.methods.planned import mac_plan
from tests.plans.factory import plan

VALUES: dict[str, Any] = {
    "window": [1024, 512, 256, 64],
    "band": [256, None, 8, 1],
    "tau": {"sqrt2d": [0.4, 0.5, 0.0, 0.9], "calibrated": [0.1, 0.2, 0.3, 0.4]},
    "sinks": 4,
}
ENERGY = torch.rand(4, 2, 16)


def made(energy: torch.Tensor = ENERGY, **changes: Any) -> Plan:
    return replace(plan("mac"), values={**VALUES, **changes}, arrays={"energy": energy})


def test_it_reads_what_a_plan_says(tmp_path: Path) -> None:
    made().save(tmp_path / "p.json")
    found = MACPlan.of(load(tmp_path / "p.json", "mac"))
    assert found.window == (1024, 512, 256, 64) and found.band == (256, None, 8, 1)
    assert found.tau == {name: tuple(values) for name, values in VALUES["tau"].items()}
    assert torch.equal(found.energy, ENERGY)
    assert found.values() == VALUES and torch.equal(found.arrays()["energy"], ENERGY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": [1, 2]}, ["window: expected one number for each of 4 layers"]),
        ({"window": [0, 1, 1, 1]}, ["window: expected counts in [1, 16777216), got 0;"]),
        ({"window": [1, 1, 1 << 25, 1]}, ["window: expected counts in [1, 16777216), got 33554432;"]),
        ({"window": [1, None, 1, 1]}, ["window: expected counts in [1, 16777216), got None;"]),
        ({"band": [1, 1 << 24, 1, 1]}, ["band: expected counts in [1, 16777216) or null, got 16777216;"]),
        ({"window": 3}, ["window: expected one number"]),
        ({"band": [1, 2, 3, True]}, ["band: expected counts in [1, 16777216) or null, got True;"]),
        ({"sinks": -1}, ["sinks: expected a count in [0, 16777216), got -1;"]),
        ({"sinks": [4]}, ["sinks: expected a count in [0, 16777216), got [4];"]),
        ({"tau": [0.1]}, ["tau: expected an object"]),
        ({"tau": {"sqrt2d": [0.1] * 4}}, ["tau: expected one for each of sqrt2d, calibrated"]),
        ({"tau": {**VALUES["tau"], "sqrt2d": [0.1, 0.2, 0.3, 1.0]}}, ["tau.sqrt2d: expected numbers in [0, 1)"]),
        ({"tau": {**VALUES["tau"], "calibrated": [0.1, 0.2, -0.3, 0.5]}}, ["tau.calibrated: expected", "-0.3"]),
        ({"tau": {**VALUES["tau"], "calibrated": [0.1]}}, ["tau.calibrated: expected one number for each of 4 layers"]),
        ({"tau": {**VALUES["tau"], "sqrt2d": 0.1}}, ["tau.sqrt2d: expected one number for each of 4 layers, got 0.1"]),
        ({"energy": -ENERGY}, ["energy: expected numbers >= 0"]),
        ({"energy": ENERGY[:, :1]}, ["energy: expected [4, 2, 16], got float32[4, 1, 16]"]),
        ({"energy": ENERGY[0]}, ["energy: expected float [L, G, D]"]),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        MACPlan.of(made(**change))
    for word in (*words, "calibrate again"):
        assert word in str(error.value)


@pytest.mark.parametrize("name", [*VALUES, "energy"])
def test_what_is_missing_is_named(name: str) -> None:
    broken = made()
    arrays = {} if name == "energy" else broken.arrays
    values = {n: v for n, v in broken.values.items() if n != name}
    with pytest.raises(InvalidInput, match=f"lacks the .* '{name}'"):
        MACPlan.of(replace(broken, values=values, arrays=arrays))


def test_another_kind_of_plan_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected a plan for mac, got one for loki"):
        MACPlan.of(replace(made(), kind="loki"))


def layers(method: MAC) -> list[LayerState]:
    cache = new_cache()
    read_text(method, text(12), cache=cache, steps=1)
    assert isinstance(cache.state, StateStore)
    return [s for s in cache.state.states() if isinstance(s, LayerState)]


def test_each_layer_has_the_plans_numbers() -> None:
    """MAC's options come first where they are given."""
    whole = MACPlan.of(mac_plan(MODEL))
    for layer, state in enumerate(layers(MAC(window=None, band=None, tau=None))):
        rule = state.rule
        assert (rule.window, rule.band) == (whole.window[layer], whole.band[layer]) and state.weight is None
        assert rule.limit == pytest.approx(2 * DIM * (1 - whole.tau["sqrt2d"][layer]) ** 2)
    for layer, state in enumerate(layers(MAC(window=7, tau=0.5, scale="calibrated"))):
        assert (state.rule.window, state.rule.band, state.rule.limit) == (7, 256, 0.25)
        weight = whole.energy[layer].double().sqrt() * SCALE
        torch.testing.assert_close(state.weight, weight.repeat_interleave(2, 0).float())
    assert layers(MAC(window=None, max_gap=10, band=3))[0].rule.window == 10


def test_a_layer_that_no_band_is_wide_enough_for_attends_densely(tmp_path: Path) -> None:
    """It keeps no ring and fills none; with a band given it is a layer like the others."""
    base = mac_plan(MODEL)
    wide = replace(base, values={**base.values, "band": [4, None, 5]})
    wide.save(tmp_path / "wide.json")
    method = MAC(band=None, window=24, tau=0.0, min_context=0, plan=str(tmp_path / "wide.json"))
    turns = read_text(method, text(60), steps=20)[-20:]
    for layer in range(LAYERS):
        outcomes = [turn.outcomes[layer] for turn in turns]
        if layer == 1:
            assert {o.dense_reason for o in outcomes} == {"the plan has no band wide enough"}
            assert all(o.notes is None for o in outcomes)
            assert all(metadata_of(turn.calls[layer]) == ([0], 0) for turn in turns)
        else:
            assert any(bool(o.notes.tensors[0][0, :, 2].any()) for o in outcomes if o.notes)
    assert len(layers(method)) == LAYERS - 1
    some = layers(replace(method, band=3, window=None))
    assert [state.rule.band for state in some] == [3] * LAYERS and some[1].rule.limit > 0


def test_bands_of_a_plan_leave_out_the_sinks_that_entries_do(tmp_path: Path) -> None:
    """With its bands come its sinks, or more; a band of one's own needs none."""
    base = mac_plan(MODEL)
    replace(base, values={**base.values, "sinks": 3}).save(tmp_path / "sinks.json")
    file = str(tmp_path / "sinks.json")
    given: list[tuple[dict[str, Any], int]] = [
        ({"band": None}, 3), ({"band": None, "sinks": 5}, 5), ({"tau": None}, 0), ({"tau": None, "sinks": 1}, 1),
    ]  # fmt: skip
    for options, sinks in given:
        assert [state.rule.sinks for state in layers(MAC(plan=file, **options))] == [sinks] * LAYERS
    assert [state.rule.sinks for state in layers(MAC())] == [0] * LAYERS
    for few in (MAC(plan=file, band=None, sinks=2), MAC(plan=file, band=None, window=None, sinks=0)):
        with pytest.raises(InvalidInput, match=r"sinks: expected at least 3, .* got [02]; leave sinks out"):
            few.check(MODEL)


def test_a_rank_takes_its_own_heads_energies() -> None:
    turn = run(new_cache(), in_phase(MAC(), "prefill"), [Turn(text(10), 0, 5)])
    call, method = turn.calls[1], MAC(scale="calibrated")
    energy = MACPlan.of(mac_plan(MODEL)).energy[1]
    one = method.new_state(_of_two(call), 1)
    assert isinstance(one, LayerState)
    assert one.weight is not None and KV_HEADS == 2
    torch.testing.assert_close(one.weight, (energy[1:].double().sqrt() * SCALE).repeat_interleave(2, 0).float())


def _of_two(call: LayerCall) -> LayerCall:
    """What the second of two ranks sees."""
    kv = replace(call.kv, k=call.kv.k[:, 1:], v=call.kv.v[:, 1:])
    rows = replace(call.rows, q=call.rows.q[:, 2:])
    return replace(call, rows=rows, kv=kv, shard=HeadShard(1, 1, 2))


def test_without_a_model_no_plan_is_found() -> None:
    call = run(new_cache(), in_phase(MAC(), "prefill"), [Turn(text(10), 0, 5)]).calls[0]
    with pytest.raises(InvalidInput, match=r"LayerCall\.model is required: MAC looks up its plan by model"):
        MAC(tau=None).new_state(replace(call, model=None), 1)
    MAC().new_state(replace(call, model=None), 1)
