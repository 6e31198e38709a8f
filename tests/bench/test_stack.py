"""A method's layers in one sequence: what is timed is a model's mix of layers, checked, beside dense attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.bench.case import Case, Memory, Stack
from longreach.bench.cases import CASES, tiny
from longreach.bench.check import WrongResult
from longreach.bench.check_selection import check_layer, check_selection
from longreach.bench.format import goal, outcome
from longreach.bench.inputs import Inputs
from longreach.bench.run import run_case
from longreach.bench.stack import Layers, planned
from longreach.methods.kascade.quantised_keys import QuantisedKeys
from longreach.methods.kascade.state import KascadeState
from longreach.ops import Lists, Partial, ScoringKeys, Spans, quantise_keys
from longreach.ops.doors import Read

CPU = torch.device("cpu")
SMALL = tiny(CASES["kascade-128k-b32"])


def test_the_real_proportion_of_layers() -> None:
    for case in CASES.values():
        if case.stack is not None:
            layers = 36 if "qwen3" in case.name else 32
            assert (case.stack.anchors[0], len(case.stack.anchors), case.stack.layers) == (0, 5, layers)
    table = [name for name, case in CASES.items() if case.group == "kascade-table"]
    assert len(table) == 15 and CASES["kascade-128k-30pct-b64"].targets[0].bound == 2.17
    assert CASES["kascade-8k-20pct-b64"].stack == Stack(options=(("k", 0.2),))


def test_a_case_runs_beside_dense_attention() -> None:
    result = run_case(SMALL, CPU, without=["flashinfer", "flash_attention_3"], replays=2)
    names = [e["name"] for e in result["entries"]]
    assert names[:4] == ["kascade", "layer 0", "reuse layer", "anchor"] and len(names) == 9
    assert names[4:8] == [f"anchor: {name}" for name in ("score", "pool", "top_k", "attend")]
    read = {e["name"]: e["settings"]["bytes_read_a_layer"] for e in result["entries"][:8]}
    dense = result["bytes_needed"]
    assert read["anchor: score"] == dense // 2 and read["anchor: attend"] == 128 * 2 * 2 * 4 * SMALL.shape.dim
    assert read["layer 0"] == dense
    keys, entries = 128 * 2 * 2, 4 * 128 * 2 * 2  # of 256; for 2 sequences and heads; bytes of lists
    vector = 4 * SMALL.shape.dim
    assert read["reuse layer"] == 2 * keys * vector + entries
    assert read["anchor"] == dense // 2 + keys * vector + entries
    whole = read["layer 0"] + read["anchor"] + 2 * read["reuse layer"]
    assert read["kascade"] == whole / 4
    assert 0.999 <= result["mass_of_chosen"] <= 1.0
    assert result["error"] < 1e-4


def small(*options: tuple[str, Any], name: str = "kascade-128k-b32") -> Case:
    case = CASES[name]
    assert case.stack is not None
    return tiny(replace(case, stack=replace(case.stack, options=(*case.stack.options, *options))))


def test_8_bit_keys_are_those_of_each_copy_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted in pieces that end within a sequence, before anything is chosen by them; anchors alone have copies."""
    monkeypatch.setattr("longreach.cache.token_state.AT_ONCE", 100 * 2 * 16)
    case = small(name="kascade-int8-128k-b32")
    inputs = Inputs(case, CPU, 0)
    with planned(case, 0) as (method, model, _):
        layers = Layers(inputs, Memory(), method, model, "reference")
        for copy in range(inputs.copies):
            k, _ = inputs.kv(copy, Memory())
            codes, scale = quantise_keys(k)
            state = layers.state(2, copy)
            assert isinstance(state, KascadeState) and state.copy is not None
            assert torch.equal(state.copy["keys"], codes) and torch.equal(state.copy["scale"], scale)
            assert layers.state(2, copy) is state is not layers.state(2, copy + 1)
        others = [layers.state(layer, 0) for layer in (0, 1, 3)]
    assert all(isinstance(state, KascadeState) and state.copy is None for state in others)


def test_choosing_by_8_bit_keys_is_judged_by_the_mass_of_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = CASES["kascade-int8-128k-b32"].targets
    assert [(t.quantity, t.bound) for t in targets] == [("speed over fastest", 5.4), ("mass of chosen keys", 0.995)]
    case, without = small(name="kascade-int8-128k-b32"), ["flashinfer", "flash_attention_3"]
    result = run_case(replace(case, targets=targets), CPU, without=without, replays=2)
    read = {e["name"]: e["settings"]["bytes_read_a_layer"] for e in result["entries"][:8]}
    keys, vector = 256 * 2 * 2, 4 * SMALL.shape.dim
    assert read["anchor: score"] == keys * (SMALL.shape.dim + 4) and read["anchor: attend"] == keys * vector
    speed, mass = result["targets"]
    assert speed["got"] is None and mass["got"] == result["mass_of_chosen"] > 0.995 and mass["reached"]
    assert goal(mass) == "kascade: mass of chosen keys >= 0.995" and outcome(mass).startswith(f"{mass['got']:.4f}, re")
    monkeypatch.setattr(QuantisedKeys, "note", lambda self, *_: self["keys"].zero_())  # codes that say nothing
    same = property(lambda self: ScoringKeys(self["keys"], torch.ones_like(self["scale"])))
    monkeypatch.setattr(QuantisedKeys, "scoring", same)
    with pytest.raises(WrongResult, match="chosen keys hold 0"):
        run_case(case, CPU, without=without, replays=2)


def test_one_set_for_all_heads_is_checked_against_all_heads() -> None:
    without = ["flashinfer", "flash_attention_3", "torch_sdpa"]
    result = run_case(small(("heads", "all")), CPU, without=without, replays=2)
    assert 0.999 <= result["mass_of_chosen"] <= 1.0


def test_keys_that_are_always_chosen_are_in_the_exact_choice_too() -> None:
    """A hundred of the 128: what is left to choose is few, so the plain best hold far more."""
    case = small(("sinks", 40), ("recent", 60))
    inputs = Inputs(case, CPU, 0)
    with planned(case, 0) as (method, model, _):
        made = Layers(inputs, Memory(), method, model, "reference").all()
    lists = made[3][0].meter.keys[0]
    assert check_selection(inputs, Memory(), 0, lists, sinks=40, recent=60) > 0.999
    with pytest.raises(WrongResult, match="chosen keys hold 0"):
        check_selection(inputs, Memory(), 0, lists)
    with pytest.raises(WrongResult, match="one of the first 41 and last 60 keys"):
        check_selection(inputs, Memory(), 0, lists, sinks=41, recent=60)
    whole = run_case(case, CPU, without=["flashinfer", "flash_attention_3", "torch_sdpa"], replays=2)
    assert whole["mass_of_chosen"] > 0.999


def test_passes_that_are_not_the_anchors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(SMALL, CPU, 0)
    with planned(SMALL, 0) as (method, model, _):
        layers = Layers(inputs, Memory(), method, model, "reference")
        assert list(layers.passes(2, 0)) == ["score", "pool", "top_k", "attend"]
        other = layers.run(2, 1, {})
        monkeypatch.setattr(layers, "run", lambda layer, copy, shared: other)
        with pytest.raises(WrongResult, match="passes differ from the anchor by"):
            layers.passes(2, 0)


@pytest.fixture
def outcomes() -> Any:
    inputs = Inputs(SMALL, CPU, 0)
    with planned(SMALL, 0) as (method, model, plan):
        yield inputs, plan, Layers(inputs, Memory(), method, model, "reference").all()


def test_lists_come_from_the_run_and_go_through_the_head_map(outcomes: Any) -> None:
    inputs, plan, made = outcomes
    assert inputs.copies == 2
    first, reuse, anchor, last = (call.meter.values[0] for call, _ in made)
    assert isinstance(first, Spans) and all(isinstance(s, Lists) for s in (reuse, anchor, last))
    assert reuse.index.data_ptr() != anchor.index.data_ptr() == last.index.data_ptr()
    assert reuse.head_map is None or reuse.head_map.tolist() == list(plan.head_map[1])


def test_wrong_outputs_and_choices_are_found(outcomes: Any) -> None:
    inputs, _, made = outcomes
    call, right = made[1]
    assert check_layer("it", inputs, Memory(), 1, call, right) < 1e-5
    off = Partial(right.partial.out * 1.01, right.partial.lse)
    with pytest.raises(WrongResult, match=r"it: relative error 1\.0"):
        check_layer("it", inputs, Memory(), 1, call, right._replace(partial=off))
    with pytest.raises(WrongResult, match="relative error"):
        check_layer("it", inputs, Memory(), 0, call, right)  # of another copy's keys
    lists = made[3][0].meter.keys[0]
    assert check_selection(inputs, Memory(), 0, lists) > 0.999
    with pytest.raises(WrongResult, match="hold 0"):
        check_selection(inputs, Memory(), 1, lists)
    without = replace(lists, count=lists.count - 1)
    with pytest.raises(WrongResult, match="newest"):
        check_selection(inputs, Memory(), 0, without)
    attended, other = call.meter.values[0], call.observer()
    other.count_read(Read.of(call.kv, replace(attended, index=attended.index.flip(-1))))
    with pytest.raises(WrongResult, match="do not ascend"):
        check_layer("it", inputs, Memory(), 1, other, right)
