"""From what prompts gave to a plan: means, weights, head maps, layers with windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.kascade.plan import KascadePlan
from longreach.plans import load
from tests.plans.factory import plan

TOTAL, HEADS = 5, 2
LAYERS = (1, 2, 4)  # of full attention


def prompts(count: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shares = torch.rand(count, TOTAL, HEADS, TOTAL, HEADS, generator=draw)
    return list(shares), list(torch.rand(count, TOTAL, generator=draw, dtype=torch.float64))


def test_the_mean_over_prompts_of_layers_that_take_part() -> None:
    shares, importance = prompts()
    found = CalibrationResult.mean(LAYERS, shares, importance)
    assert found.heads.shape == (3, HEADS, 3, HEADS) and found.heads.dtype == torch.float64
    want = (shares[0].double() + shares[1].double() + shares[2].double()) / 3
    assert found.heads[1, 0, 2, 1] == want[2, 0, 4, 1]
    assert torch.equal(found.importance, (importance[0] + importance[1] + importance[2]) / 3)


def test_similarity_is_the_best_heads_mean_weighted_by_the_layer_it_is_for() -> None:
    found = CalibrationResult.mean(LAYERS, *prompts())
    for a in range(3):
        for b in range(3):
            best = sum(max(float(found.heads[a, i, b, j]) for i in range(HEADS)) for j in range(HEADS)) / HEADS
            want = best if b >= a else 0.0
            assert float(found.plain[a, b]) == pytest.approx(want)
            assert float(found.similarity[a, b]) == pytest.approx(want * float(found.importance[LAYERS[b]]))


def test_heads_are_mapped_to_the_best_of_their_anchor_many_to_one() -> None:
    heads = torch.zeros(3, HEADS, 3, HEADS)
    heads[0, 1, 1] = torch.tensor([0.9, 0.8])  # both heads of the second layer want what head 1 of the first chose
    heads[0, 0, 1] = torch.tensor([0.5, 0.7])
    heads[0, :, 2] = torch.tensor([[0.6, 0.6], [0.6, 0.7]])  # equal for the first: the lower
    heads[1, :, 2] = torch.tensor([[0.1, 0.9], [0.2, 0.3]])
    found = CalibrationResult(LAYERS, heads, torch.ones(TOTAL))
    assert found.head_map([0]) == [(0, 1), (1, 1), (0, 1)]
    assert found.head_map([0, 1]) == [(0, 1), (0, 1), (1, 0)]
    made = found.with_anchors([0, 1], 64, 128)
    assert made == KascadePlan((1, 2), ((0, 1), (0, 1), (0, 1), (0, 1), (1, 0)), LAYERS, 64, 128)


def test_a_plan_keeps_it(tmp_path: Path) -> None:
    found = CalibrationResult.mean(LAYERS, *prompts())
    made = found.plan(2, 64, 128)
    base = plan("kascade")
    whole = replace(base, model=replace(base.model, layers=TOTAL), values=found.values(made), arrays=found.arrays())
    whole.save(tmp_path / "p.json")
    again = CalibrationResult.of(load(tmp_path / "p.json", "kascade"))
    assert again.layers == LAYERS and torch.equal(again.heads, found.heads.float().double())
    assert torch.equal(again.importance, found.importance.float().double())
    assert again.plan(2, 64, 128) == made == KascadePlan.of(whole)
    for name, shape in (("similarity", [3, 2, 3, 2]), ("importance", [5])):
        without = replace(whole, arrays={n: x for n, x in whole.arrays.items() if n != name})
        with pytest.raises(InvalidInput, match=f"lacks the array '{name}'"):
            CalibrationResult.of(without)
        with pytest.raises(InvalidInput) as error:
            CalibrationResult.of(replace(whole, arrays={**whole.arrays, name: torch.ones(7)}))
        assert f"'{name}': expected {shape}" in str(error.value)


@pytest.mark.parametrize("budget", [0, 4])
def test_no_more_anchors_than_layers_of_full_attention(budget: int) -> None:
    with pytest.raises(InvalidInput, match=f"1 to 3 anchors.*got {budget}"):
        CalibrationResult.mean(LAYERS, *prompts()).plan(budget, 64, 128)


def test_layers_may_count_alike() -> None:
    found = CalibrationResult.mean(LAYERS, *prompts())
    alike = replace(found, weighted=False)
    assert torch.equal(alike.similarity, found.plain) and alike.head_map([0]) == found.head_map([0])
    heads = torch.full((3, HEADS, 3, HEADS), 0.5)
    heads[0, :, 1], heads[0, :, 2] = 0.8, 0.2  # the last layer finds least, but counts little
    for layer in range(3):
        heads[layer, :, layer] = torch.eye(HEADS)
    heavy = CalibrationResult(LAYERS, heads, torch.tensor([0.0, 1.0, 9.0, 0.0, 0.1]))
    assert heavy.plan(2, 64, 128).anchors == (1, 2)
    assert replace(heavy, weighted=False).plan(2, 64, 128).anchors == (1, 4)


def test_heads_stay_on_their_rank() -> None:
    draw = torch.Generator().manual_seed(1)
    heads = torch.rand(3, 4, 3, 4, generator=draw, dtype=torch.float64)
    free = CalibrationResult((0, 1, 2), heads, torch.ones(3))
    apart = replace(free, ranks=2)
    assert any(h // 2 != place // 2 for row in free.head_map([0])[1:] for place, h in enumerate(row))
    for row, layer in zip(apart.head_map([0])[1:], (1, 2), strict=True):
        for place, h in enumerate(row):
            mine = range(place // 2 * 2, place // 2 * 2 + 2)
            assert h == max(mine, key=lambda i: float(heads[0, i, layer, place]))
    given = [max(float(heads[0, i, 1, j]) for i in range(j // 2 * 2, j // 2 * 2 + 2)) for j in range(4)]
    assert float(apart.plain[0, 1]) == pytest.approx(sum(given) / 4)
    assert replace(free, ranks=4).head_map([0]) == [(0, 1, 2, 3)] * 3
    for ranks in (3, 0, 8):
        with pytest.raises(InvalidInput, match=f"divides the 4 KV heads, got {ranks}"):
            replace(free, ranks=ranks)
