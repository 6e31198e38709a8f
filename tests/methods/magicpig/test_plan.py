"""What MagicPIG takes from a plan, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.call import ModelShape
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.plan import ARRAYS, DENSE, MagicPIGPlan, chosen_for
from longreach.methods.magicpig.state import LayerTables
from longreach.plans import load
from tests.methods.drive import MODEL
from tests.methods.one_layer import Layers
from tests.methods.planned import changed, loki_plan, magicpig_plan

PLANNED = {"local": 8, "seal": 8, "centre": 8}  # options of the plan that differ from the defaults


def layers_of(method: MagicPIG, **more: Any) -> Layers:
    """Layers of the model that the plan of the tests is for."""
    return Layers(
        method, layers=MODEL.layers, heads=MODEL.kv_heads, group=MODEL.query_heads // MODEL.kv_heads,
        dim=MODEL.head_dim, slots=1, **more,
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    magicpig_plan(MODEL).save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_it_comes_back_from_a_file(saved: Path) -> None:
    before, after = MagicPIGPlan.of(magicpig_plan(MODEL)), MagicPIGPlan.of(load(saved, "magicpig"))
    assert before.values() == after.values() and before.options == after.options
    for name in ARRAYS:
        assert torch.equal(getattr(before, name), getattr(after, name))


def test_layers_have_the_plans_bits_and_tables(saved: Path) -> None:
    """Given by file, by name, and as the shipped plan of the model: state, memory, reports and dense layers."""
    for plan in (str(saved), "magicpig-drive", None):
        method = MagicPIG.make(**PLANNED, plan=plan)
        method.check(MODEL)
        layers = layers_of(method)
        layers.read([0], [60])
        done = layers.decode([0])
        found = []
        for n, (_, outcome) in enumerate(done):
            state = layers.state(n) if n != 1 else None
            if not isinstance(state, LayerTables):
                assert outcome.dense_reason == "dense in the plan" and outcome.notes is None
                continue
            columns = outcome.notes.columns(*(x[None] for x in outcome.notes.tensors)).sum(1)[0]
            said = outcome.notes.summary(columns, 1)
            assert (said["bits"], said["tables"]) == (state.tables.bits, state.tables.tables)
            found.append((said["bits"], said["tables"]))
        assert found == [(4, 9), (5, 12)]
        alone = [MagicPIG.make(**PLANNED, bits=bits, tables=tables, dense_layers=()) for bits, tables in found]
        one = ModelShape(1, MODEL.query_heads, MODEL.kv_heads, MODEL.head_dim)
        sizes = [m.state_bytes(one, 2, 100, torch.float32) for m in alone]
        assert method.state_bytes(MODEL, 2, 100, torch.float32) == sum(sizes)
        most = max(m.workspace_bytes(one, 2, 100, torch.float32) for m in alone)
        assert method.workspace_bytes(MODEL, 2, 100, torch.float32) == most


def test_a_budget_chooses_again(saved: Path) -> None:
    plan = MagicPIGPlan.of(load(saved, "magicpig"))
    for budget in (0.45, 0.9):
        chosen = plan.choose(budget)
        assert chosen != plan.chosen
        layers = layers_of(MagicPIG.make(**PLANNED, plan=str(saved), budget=budget))
        layers.read([0], [60])
        layers.decode([0])
        for n, pair in enumerate(chosen):
            if pair != DENSE:
                state = layers.state(n)
                assert isinstance(state, LayerTables) and (state.tables.bits, state.tables.tables) == pair
    everything = MagicPIG.make(**PLANNED, budget=1)
    assert everything.state_bytes(MODEL, 2, 100, torch.float32) == 0
    assert everything.workspace_bytes(MODEL, 2, 100, torch.float32) == 0


def test_a_budget_chooses_within_the_plans_memory(tmp_path: Path) -> None:
    """The limit of the calibration holds for other budgets, in state and reports."""
    made = magicpig_plan(MODEL)
    free = MagicPIGPlan.of(made)
    made.values["memory"] = 0.12
    made.save(tmp_path / "p.json")
    assert sum(free.expected(free.choose(0.6))["memory"]) > 0.12 * MODEL.layers
    layers = layers_of(MagicPIG.make(**PLANNED, plan=str(tmp_path / "p.json"), budget=0.6))
    layers.read([0], [60])
    layers.decode([0])
    found = [state.tables for state in layers.states.states((layers.method,)) if isinstance(state, LayerTables)]
    memory = dict(zip(free.pairs, free.table_memory().tolist(), strict=True))
    assert found and sum(memory[each.bits, each.tables] for each in found) <= 0.12 * MODEL.layers


def test_half_the_bytes_of_a_number_change_the_choice() -> None:
    """Look-ups take the same bytes beside keys of half the size: the same pairs read a larger share."""
    plan = MagicPIGPlan.of(magicpig_plan(MODEL))
    (wide, _), (narrow, same) = plan.reads(4), plan.reads(2)
    assert bool((narrow > wide).all()) and bool((same >= plan.reads(4)[1]).all())
    for element in (2, 4):
        found = plan.expected(plan.choose(0.8, None, element), element)
        assert sum(found["search"]) + sum(found["attention"]) <= 3 * 0.8 * 1.000001


def test_only_a_budget_chooses_for_the_dtype_of_the_cache() -> None:
    """Without one the plan's own pairs are used in any dtype, as in records that were made so."""
    plan = MagicPIGPlan.of(magicpig_plan(MODEL))
    assert chosen_for(plan, None, 2) == chosen_for(plan, None, 4) == plan.chosen
    for element in (2, 4):
        assert chosen_for(plan, 0.8, element) == plan.choose(0.8, plan.memory, element)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (
            MagicPIG(**PLANNED, seed=3),
            r"seed: the plan shipped for this model was made with 0, and this is 3; to keep seed=3 give bits= and "
            r"tables= in place of a plan, .* else give seed=0",
        ),
        (MagicPIG(**PLANNED, plan="magicpig-drive", least=3), r"least: the plan magicpig-drive was made with 2"),
        (
            MagicPIG(**PLANNED, share="own"),
            r"share: .* made with 'group', and this is 'own'; to keep share=own give bits= ",
        ),
        (MagicPIG(seal=8, centre=8), r"local: .* made with 8, and this is 64"),
        (MagicPIG(**PLANNED, sinks=2), "sinks: .* made with 4, and this is 2"),
        (MagicPIG(local=8, centre=8), "seal: .* made with 8, and this is 256"),
        (MagicPIG(local=8, seal=8), "centre: .* made with 8, and this is 1024"),
        (MagicPIG(plan="nowhere.json"), r"no plan 'nowhere\.json'"),
        (MagicPIG(**PLANNED, budget=0.05), "budget: no choice of the plan's pairs reads at most 0.05"),
    ],
)
def test_a_plan_that_does_not_go_with_the_options(method: MagicPIG, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        method.check(MODEL)


def test_a_model_without_a_plan() -> None:
    other = ModelShape(3, 4, 2, 16, config="another's")
    MagicPIG().check(other)  # 10, 75
    with pytest.raises(
        InvalidInput, match=r"budget=0\.1 needs a plan: no magicpig plan is shipped .*calibrate magicpig"
    ):
        MagicPIG(budget=0.1).check(other)
    with pytest.raises(InvalidInput, match="the plan magicpig-drive is for of the tests, and this is another model"):
        MagicPIG(plan="magicpig-drive", **PLANNED).check(other)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(InvalidInput, match="bits: a plan chooses it for each layer; leave bits out, or plan"):
        MagicPIG(plan="p.json", bits=10)
    with pytest.raises(InvalidInput, match=r"tables, dense_layers: a plan chooses them .* or budget"):
        MagicPIG(budget=0.1, tables=75, dense_layers=())
    for budget in (0, 1.5, float("nan"), True, -1, "1"):
        with pytest.raises(InvalidInput, match=r"budget: expected bytes over dense attention's, a number in \(0, 1\]"):
            MagicPIG(budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("bits", lambda x: x[:2], "bits: expected one for each of 3 layers, got 2"),
        ("bits", lambda x: [7, *x[1:]], r"bits, tables: expected one of the pairs or 0, 0 in layer 0, got \(7, 9\)"),
        ("tables", lambda x: 9, "tables: expected a list, got 9"),
        ("pairs", lambda x: [], "pairs: expected at least one, got none"),
        ("pairs", lambda x: [[4, 9], [17, 9], [6, 5]], r"pairs: expected \[bits, tables\] within the limits"),
        ("pairs", lambda x: [[4, 9], [4, 9], [5, 12]], "pairs: expected each once"),
        ("layers", lambda x: [0, 2, 1], "layers: expected ascending layers"),
        ("layers", lambda x: [0, 1, 3], "layers: expected ascending layers"),
        ("seed", lambda x: -1, "seed: expected an int in"),
        ("least", lambda x: True, "least: expected an int in"),
        ("centre", lambda x: 65537, r"centre: expected an int in \[0, 65536\]"),
        ("share", lambda x: "head", "share: expected 'own' or 'group'"),
        ("budget", lambda x: 0, "budget: expected a share of dense"),
        ("memory", lambda x: -1.0, "memory: expected a share > 0"),
        ("length", lambda x: 0, "length: expected a count"),
        ("element", lambda x: None, "element: expected a count"),
        *((name, None, f"the plan lacks the value '{name}'") for name in ("bits", "seed", "centre", "pairs")),
    ],
)
def test_broken_values(name: str, change: Callable[[Any], Any] | None, complaint: str) -> None:
    plan = magicpig_plan(MODEL)
    with pytest.raises(InvalidInput, match=complaint):
        MagicPIGPlan.of(replace(plan, values=changed(plan.values, name, change)))


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("error", lambda x: x[:2], r"error: expected float \[3, 2, 3\]"),
        ("error", lambda x: -x, r"error: expected numbers in \[0, inf\]"),
        ("sampled", lambda x: x.int(), r"sampled: expected float \[3, 2, 3\]"),
        ("sampled", lambda x: 5 * x, r"sampled: expected numbers in \[0, 1\.0\]"),
        ("sampled_heads", lambda x: 5 * x, r"sampled_heads: expected numbers in \[0, 2\.0\]"),
        *((name, None, f"the plan lacks the array '{name}'") for name in ARRAYS),
    ],
)
def test_broken_arrays(name: str, change: Callable[[Any], Any] | None, complaint: str) -> None:
    plan = magicpig_plan(MODEL)
    with pytest.raises(InvalidInput, match=complaint):
        MagicPIGPlan.of(replace(plan, arrays=changed(plan.arrays, name, change)))


def test_files_that_are_no_plans_of_it(tmp_path: Path) -> None:
    loki_plan(MODEL).save(tmp_path / "l.json")
    with pytest.raises(InvalidInput, match="expected a plan for magicpig, got one for 'loki'"):
        MagicPIG(plan=str(tmp_path / "l.json")).check(MODEL)
    with pytest.raises(InvalidInput, match="expected a plan for magicpig, got one for loki"):
        MagicPIGPlan.of(loki_plan(MODEL))
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(InvalidInput, match="is no plan: no valid JSON"):
        MagicPIG(plan=str(tmp_path / "d.json")).check(MODEL)
