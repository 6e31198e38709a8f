"""Kascade's view of a plan: what it says, and every way in which it does not fit, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.methods.kascade.plan import KascadePlan
from longreach.plans import Plan, load
from tests.plans.factory import plan

VALUES = {"anchors": [1, 3], "head_map": [[0, 1], [0, 1], [1, 1], [0, 1], [1, 0]], "layers": [1, 2, 3, 4],
          "k": 64, "tile": 128}  # fmt: skip


def made(**changes: Any) -> Plan:
    """For a model of five layers, the first of which has a sliding window."""
    base = plan("kascade", arrays={})
    return replace(base, model=replace(base.model, layers=5), values={**VALUES, **changes})


def test_it_reads_what_a_plan_says(tmp_path: Path) -> None:
    made().save(tmp_path / "p.json")
    found = KascadePlan.of(load(tmp_path / "p.json", "kascade"))
    assert found == KascadePlan((1, 3), ((0, 1), (0, 1), (1, 1), (0, 1), (1, 0)), (1, 2, 3, 4), 64, 128)
    assert [found.anchor_of(layer) for layer in found.layers] == [1, 1, 3, 3]
    assert found.values() == VALUES
    assert hash(found) == hash(replace(found))


def test_other_values_may_stand_beside_it() -> None:
    assert KascadePlan.of(made(importance=[1.0])).anchors == (1, 3)


def rows(**changed: Any) -> list[Any]:
    """The head map with other rows: n2=[...] for that of layer 2."""
    found: list[Any] = list(VALUES["head_map"])  # type: ignore[call-overload]
    for name, row in changed.items():
        found[int(name[1:])] = row
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"anchors": []}, ["anchors: expected a list"]),
        ({"anchors": [1, 5]}, ["anchors: expected layer numbers from 0 to 4", "(1, 5)"]),
        ({"anchors": [1, -1]}, ["anchors: expected layer numbers from 0 to 4", "(1, -1)"]),
        ({"anchors": [3, 1]}, ["anchors: expected ascending and distinct"]),
        ({"anchors": [1, 1]}, ["anchors: expected ascending and distinct"]),
        ({"anchors": [2, 3]}, ["anchors: expected the first to be 1", "got 2"]),
        ({"anchors": [0, 1]}, ["anchors: expected layers of full attention, got [0]"]),
        ({"anchors": [1, True]}, ["anchors: expected layer numbers from 0 to 4"]),
        ({"anchors": 1}, ["anchors: expected a list"]),
        ({"layers": [1, 2, 3, 5]}, ["layers: expected layer numbers from 0 to 4"]),
        ({"layers": []}, ["layers: expected a list"]),
        ({"head_map": []}, ["head_map: expected a list"]),
        ({"head_map": rows()[:4]}, ["layers: expected layer numbers from 0 to 3"]),
        ({"head_map": [*rows(), [0, 1]]}, ["head_map: expected 5 layers of 2 KV heads, got 6 of 2"]),
        ({"head_map": [[0]] * 5}, ["head_map: expected 5 layers of 2 KV heads, got 5 of 1"]),
        ({"head_map": rows(n2=[1, 2])}, ["head_map of layer 2", "below 2", "(1, 2)"]),
        ({"head_map": rows(n2=[1, -1])}, ["head_map of layer 2"]),
        ({"head_map": rows(n2=[1])}, ["head_map of layer 2"]),
        ({"head_map": rows(n2=[])}, ["head_map of layer 2"]),
        ({"head_map": rows(n2=1)}, ["head_map of layer 2", "a list"]),
        ({"head_map": rows(n2=["0", "1"])}, ["head_map of layer 2"]),
        ({"head_map": rows(n3=[1, 0])}, ["head_map of layer 3", "each head its own"]),
        ({"head_map": rows(n0=[1, 0])}, ["head_map of layer 0", "each head its own"]),
        ({"head_map": [[]] * 5}, ["head_map of layer 0"]),
        ({"k": 0}, ["k: expected a count"]),
        ({"dense_below": 4096}, ["dense_below: expected the values of each device"]),
        ({"tile": 12.8}, ["tile: expected a count"]),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        KascadePlan.of(made(**change))
    for word in (*words, "calibrate again"):
        assert word in str(error.value)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "tile"])
def test_a_value_that_is_missing_is_named(name: str) -> None:
    broken = made()
    with pytest.raises(InvalidInput, match=f"lacks the value '{name}'"):
        KascadePlan.of(replace(broken, values={n: v for n, v in broken.values.items() if n != name}))


def test_a_plan_for_decode_only_has_no_tile() -> None:
    without = replace(made(), values={n: v for n, v in VALUES.items() if n != "tile"})
    found = KascadePlan.of(without)
    assert found.tile is None and found.values() == without.values


def test_break_evens_of_devices() -> None:
    found = KascadePlan.of(made(dense_below={"NVIDIA H200": {"decode": 4096, "prefill": 0}, "cpu": {"decode": 2}}))
    assert found.dense_below["NVIDIA H200"]["decode"] == 4096
    assert found.values()["dense_below"] == dict(found.dense_below) and hash(found) == hash(KascadePlan.of(made()))


@pytest.mark.parametrize("phases", [5, [], {"decode": -1}, {"prefill": True}, {"both": 3}, {"decode": None}])
def test_break_evens_that_are_no_numbers_of_tokens(phases: Any) -> None:
    with pytest.raises(
        InvalidInput, match=r"dense_below of cpu: expected numbers of tokens.*longreach plan break-even"
    ):
        KascadePlan.of(made(dense_below={"cpu": phases}))


def test_another_kind_of_plan_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected a plan for kascade, got one for loki"):
        KascadePlan.of(replace(made(), kind="loki"))
