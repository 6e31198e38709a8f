"""Pictures of calibrations, of any number of layers, heads and budgets."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from longreach.records.report.calibration import importance, kept, similarity, top_mass, worth
from tests.records.report.plots.test_plots import pixels
from tests.tiers import swept

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"


def has(png: bytes, color: str, least: int = 5) -> bool:
    """Thin lines and small marks blend with what is around them."""
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(pixels(png) - wanted).max(-1) < 0.12).sum()) >= least


@pytest.fixture(autouse=True)
def strict() -> object:
    """What does not fit is a warning of matplotlib."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("layers", swept([1, 80, 12, 2, 36], 3))
def test_similarity_of_layers(layers: int) -> None:
    values = [[1.0 if a == b else 0.9 / (1 + b - a) if b > a else 0.0 for b in range(layers)] for a in range(layers)]
    png = similarity("a model", range(layers), values, (0,))
    assert pixels(png).std() > 0.05
    if layers == 12:
        assert png == similarity("a model", range(layers), values, (0,))
        assert png != similarity("a model", range(layers), values, (0, 1))  # anchors are marked
        below = [[0.7 if b < a else v for b, v in enumerate(row)] for a, row in enumerate(values)]
        assert png == similarity("a model", range(layers), below, (0,))  # nothing stands below the diagonal


@pytest.mark.parametrize("layers", [1, 32])
def test_importance_of_layers(layers: int) -> None:
    png = importance("a model", [1 / (1 + n) for n in range(layers)])
    assert has(png, BLUE) and png != importance("a model", [1 / (2 + n) for n in range(layers)])


@pytest.mark.parametrize("budgets", [1, 8])
def test_what_budgets_are_worth(budgets: int) -> None:
    best, even, read = ([f + n / 20 for n in range(budgets)] for f in (0.6, 0.5, 0.1))
    png = worth("a model", best, even, read)
    assert has(png, BLUE) and has(png, ORANGE) and has(png, GREEN)


def test_weight_of_the_top_keys() -> None:
    assert pixels(top_mass("a model", [[0.1, 0.9], [0.5, 1.0]])).std() > 0.05


def test_what_sharing_keeps() -> None:
    x = [2.0, 4.0, 256.0]
    found = {"one": {"weight": [0.9, 0.8, 0.7], "error": [0.1, 0.2, 0.3]},
             "other": {"weight": [0.8, 0.6, 0.5], "error": [0.2, 0.4, 0.5]}}  # fmt: skip
    png = kept("a model", "rows", x, found, doubling=True)
    assert has(png, BLUE) and has(png, ORANGE) and png != kept("a model", "rows", x, found)
    without = kept("a model", "rows", x, {**found, "other": {"weight": None, "error": None}})
    assert has(without, BLUE) and not has(without, ORANGE)
