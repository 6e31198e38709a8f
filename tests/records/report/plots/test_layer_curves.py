"""Curves of layers: a valid picture for any number of layers, places and heights."""

from __future__ import annotations

import warnings

import pytest

from longreach.records.report.plots import LayerPanel, layer_curves
from tests.records.report.plots.test_plots import has, pixels


@pytest.mark.covering
@pytest.mark.parametrize("layers", [1, 2, 80])
@pytest.mark.parametrize("places", [1, 4, 21])
@pytest.mark.parametrize("most", [0.0, 0.02, 1.0])
def test_any_shape(layers: int, places: int, most: float) -> None:
    curves = tuple(tuple(most * (n + p) / (layers + places - 1) for p in range(places)) for n in range(layers))
    panel = LayerPanel("text rows", "tokens back", "share", tuple(f"{2**p}-{2 ** (p + 1) - 1}" for p in range(places)),
                       curves)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png = layer_curves([panel, panel])
    assert pixels(png).std() > 0.01
    assert has(png, "#000000")


def test_first_and_last_layer_differ_in_colour() -> None:
    pytest.importorskip("matplotlib")
    panel = LayerPanel("text rows", "keys", "share", ("16", "64"), ((0.1, 0.3), (0.5, 0.6), (0.8, 0.9)))
    png = layer_curves([panel])
    assert has(png, "#472d7b", 1) or has(png, "#440154", 20)
    assert png == layer_curves([panel]) and png != layer_curves([panel, panel])
