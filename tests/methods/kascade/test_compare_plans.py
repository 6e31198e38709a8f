"""Two calibrations beside each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.methods.kascade.calibration_result import CalibrationResult
from longreach.methods.kascade.compare_plans import compare, correlation


def some(seed: int, layers: int = 4) -> CalibrationResult:
    draw = torch.Generator().manual_seed(seed)
    heads = torch.rand(layers, 2, layers, 2, generator=draw, dtype=torch.float64)
    for layer in range(layers):
        heads[layer, :, layer] = torch.eye(2)
    return CalibrationResult(tuple(range(layers)), heads, torch.rand(layers, generator=draw, dtype=torch.float64) + 0.1)


def test_with_itself() -> None:
    found = compare(some(0), some(0), 2)
    assert found.anchors[0] == found.anchors[1] and found.shared == 2 and found.kept == (1.0, 1.0)
    assert found.heads == 1.0 and found.given == 1.0
    assert found.similarity == pytest.approx(1) and found.importance == pytest.approx(1)


def test_what_differs_is_counted() -> None:
    one = some(0)
    anchor = one.plan(2, 64, 128).anchors[1]
    heads = one.heads.clone()
    last = max(layer for layer in range(4) if layer != anchor)
    source = 0 if last < anchor else anchor
    heads[source, :, last] = heads[source, :, last].flip(0)  # its heads want what the anchor's other head chose
    other = replace(one, heads=heads)
    found = compare(one, other, 2)
    assert found.anchors[0] == found.anchors[1]  # a layer's best heads give the same
    mine, theirs = one.head_map(found.anchors[0]), other.head_map(found.anchors[0])
    moved = sum(a != b for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))
    assert moved == 2 and found.heads == pytest.approx(1 - 2 / 4)
    assert found.given is not None and found.given < 1


def test_other_anchors_are_worth_less() -> None:
    for seed in range(20):
        found = compare(some(seed), some(seed + 100), 2)
        assert all(0 < kept <= 1 for kept in found.kept)
        if found.anchors[0] != found.anchors[1]:
            assert found.shared == 1 and min(found.kept) < 1
            break
    else:
        raise AssertionError("no seed with other anchors")


def test_both_are_taken_by_the_firsts_rules() -> None:
    alike, other = replace(some(0), weighted=False), some(1)
    assert compare(alike, other, 2) == compare(alike, replace(other, weighted=False), 2) != compare(some(0), other, 2)
    apart = replace(some(0), ranks=2)
    assert compare(apart, some(0), 2).heads == 1.0


def test_calibrations_of_different_models() -> None:
    with pytest.raises(InvalidInput, match="of one model"):
        compare(some(0), some(0, 5), 2)


def test_a_model_whose_layers_are_all_anchors_maps_no_head() -> None:
    found = compare(some(0), some(1), 4)
    assert found.heads is None and found.given is None and found.kept == (1.0, 1.0)


def test_correlation() -> None:
    x = torch.tensor([1.0, 2, 4])
    assert correlation(x, 3 * x + 1) == pytest.approx(1) and correlation(x, -x) == pytest.approx(-1)
    assert correlation(x, torch.ones(3)) is None and correlation(x[:1], x[:1]) is None
