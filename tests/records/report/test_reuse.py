"""Pictures of what reuse rests on, of any number of layers, with numbers that are not there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from longreach.records.report.reuse import by_gap, by_layer, by_window_and_band, depths, drift, trade, ways
from tests.records.report.plots.test_plots import pixels
from tests.records.report.test_calibration import BLUE, ORANGE, has

POINT = {"accepted": 0.5, "skipped": 0.4, "error": 0.1, "error_reused": 0.2}


@pytest.fixture(autouse=True)
def strict() -> object:
    """What does not fit is a warning of matplotlib."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("layers", [1, 32])
def test_shares_of_layers(layers: int) -> None:
    values = [[n / 40, 0.5] for n in range(layers)]
    png = by_layer("a model", "tau", (0.0, 0.45), {"accepted": values})
    assert png != by_layer("a model", "tau", (0.0, 0.45), {"accepted": [[0.9, 0.5]] * layers})
    assert png != by_layer("a model", "tau", (0.0, 0.75), {"accepted": values})


@pytest.mark.parametrize("layers", [1, 6, 80])
def test_errors_by_gap_and_band(layers: int) -> None:
    grid: list[list[float | None]] = [[0.5, None, 0.1], [None, None, 0.2]]
    chosen = [n * 2 for n in range(layers)]
    png = by_gap("a model", chosen, (1, 2, 4, 8), (1, 256), [grid] * layers)
    assert pixels(png).std() > 0.02
    if layers == 80:
        return
    assert png != by_gap("a model", chosen, (1, 2, 4, 8), (1, 256), [grid[::-1]] * layers)
    nothing: list[list[float | None]] = [[None] * 3] * 2
    assert by_gap("a model", chosen, (1, 2, 4, 8), (1, 256), [nothing] * layers) != png


def test_windows_and_bands() -> None:
    found = by_window_and_band("a model", (32, 64), (1, 8), [[0.3, 0.2], [0.1, 0.0]], [[0.9, 0.8], [0.7, 1.0]])
    assert set(found) == {"error", "read"} and all(pixels(png).std() > 0.02 for png in found.values())


def test_thresholds_and_ways() -> None:
    lower = {**POINT, "error": 0.05, "error_reused": 0.1, "skipped": 0.2}
    png = trade("a model", (0.0, 0.9), {"one": [POINT, lower], "other": [lower, lower]})
    assert has(png, BLUE) and has(png, ORANGE)
    few = ways("a model", (0.1, 0.5), {"one": [lower, POINT]}, (0.2, 0.4), {"one": [lower, None]})
    assert has(few, BLUE) and not has(few, ORANGE)
    none: dict[str, Any] = {**POINT, "error_reused": None}
    assert ways("a model", (0.1, 0.5), {"one": [none, POINT]}, (0.2, 0.4), {"one": [None, None]}) != few


def test_drift_and_depths() -> None:
    method = {"error": [[0.1, 0.3], [0.2, 0.4]], "kl": [0.0, 0.01], "depth_bins": [0, 1, 2],
              "depths": [[0.5, 0.25, 0.25], None]}  # fmt: skip
    other = {**method, "kl": [0.02, 0.03], "error": [[0.3, 0.3], [0.5, 0.4]]}
    png = drift("a model", (0, 8, 16), {"bounded": method, "free": other})
    assert has(png, BLUE) and has(png, ORANGE)
    assert pixels(depths("a model", {"bounded": method, "free": other})).std() > 0.02
