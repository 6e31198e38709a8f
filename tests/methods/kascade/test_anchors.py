"""Algorithm 1 against all sets of anchors; what even spacing and budgets are worth."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longreach.errors import InvalidInput
from longreach.methods.kascade.anchors import check_anchors, choose, curve, evenly, fewest, share_read, value
from tests.methods.kascade.brute import best_anchors, worth


@pytest.mark.parametrize("layers", range(1, 10))
def test_the_best_of_all_sets(layers: int) -> None:
    draw = torch.Generator().manual_seed(layers)
    for _ in range(5):
        similarity = torch.rand(layers, layers, generator=draw, dtype=torch.float64).triu()
        for budget in range(1, layers + 1):
            found = choose(similarity, budget)
            anchors, best = best_anchors(similarity, budget)
            assert found.anchors == anchors
            assert found.value == pytest.approx(best, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7).flatmap(lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n),
                                                    min_size=n, max_size=n)), st.data())  # fmt: skip
def test_where_many_sets_are_equal_too(rows: list[list[int]], data: st.DataObject) -> None:
    similarity = torch.tensor(rows, dtype=torch.float64).triu()
    budget = data.draw(st.integers(1, len(rows)))
    found = choose(similarity, budget)
    assert found.value == best_anchors(similarity, budget)[1] == worth(similarity, found.anchors)
    assert len(set(found.anchors)) == budget and found.anchors[0] == 0 and sorted(found.anchors) == list(found.anchors)


def test_among_equals_the_last_anchor_is_as_early_as_it_can_be() -> None:
    assert choose(torch.ones(6, 6), 3).anchors == (0, 1, 2)
    s = torch.ones(4, 4)
    s[1, 3] = 0.0  # layer 1 does not serve layer 3, so that the last of two anchors comes later
    assert choose(s, 2).anchors == (0, 2)


def test_a_planted_change_of_what_matters_is_found() -> None:
    """Layers 0-1, 2-4 and 5-6 are alike among themselves."""
    parts = [0, 0, 1, 1, 1, 2, 2]
    similarity = torch.tensor([[1.0 if a == b else 0.3 for b in parts] for a in parts]).triu()
    assert choose(similarity, 3).anchors == (0, 2, 5)
    assert choose(similarity, 2).anchors == (0, 2)
    importance = torch.tensor([1, 1, 0.01, 0.01, 0.01, 1, 1])
    assert choose(similarity * importance, 2).anchors == (0, 5)


@pytest.mark.parametrize("layers", range(1, 8))
def test_the_fewest_anchors_that_serve_every_layer(layers: int) -> None:
    """Against all sets: none with fewer anchors serves every layer, and of as many none is worth more."""
    draw = torch.Generator().manual_seed(layers)
    for least in (0.0, 0.3, 0.6, 0.9, 1.0):
        served = torch.rand(layers, layers, generator=draw, dtype=torch.float64).triu()
        served.fill_diagonal_(1.0)
        similarity = served * torch.rand(layers, generator=draw)
        found = fewest(similarity, served, least)
        sets = [(0, *rest) for n in range(layers) for rest in itertools.combinations(range(1, layers), n)]
        short = (served < least).double()
        good = [chosen for chosen in sets if value(short, chosen) == 0]
        few = [chosen for chosen in good if len(chosen) == len(good[0])]
        assert found.anchors in few
        assert found.value == pytest.approx(max(value(similarity, chosen) for chosen in few), abs=1e-12)


def test_a_share_that_is_none() -> None:
    with pytest.raises(InvalidInput, match=r"served: expected a share in \[0, 1\], got 1.1; choose another --served"):
        fewest(torch.ones(2, 2), torch.ones(2, 2), 1.1)


@pytest.mark.parametrize("budget", [0, -1, 8])
def test_budgets_that_are_none(budget: int) -> None:
    for function in (lambda: choose(torch.ones(7, 7), budget), lambda: evenly(7, budget)):
        with pytest.raises(InvalidInput, match=f"expected 1 to 7 anchors.*got {budget}.*--budget"):
            function()
    check_anchors(7, 7)


def test_even_spacing() -> None:
    assert evenly(12, 2) == (0, 6) and evenly(12, 1) == (0,) and evenly(5, 3) == (0, 1, 3) and evenly(3, 3) == (0, 1, 2)


def test_bytes_that_decoding_reads() -> None:
    assert share_read(4, 1, 1.0) == 1.0
    assert share_read(32, 5, 0.1) == pytest.approx((1 + 4 * 0.55 + 27 * 0.1) / 32)  # K whole and a tenth of V


def test_the_curve_rises_to_all_that_there_is() -> None:
    draw = torch.Generator().manual_seed(0)
    share = torch.rand(6, 6, generator=draw, dtype=torch.float64).triu(1) + torch.eye(6, dtype=torch.float64)
    weights = torch.rand(6, generator=draw, dtype=torch.float64)
    found = [c.value for c in curve(share * weights, range(1, 7))]
    assert found == sorted(found) and found[-1] == pytest.approx(float(weights.sum()))
    assert value(share * weights, range(6)) == pytest.approx(found[-1])
