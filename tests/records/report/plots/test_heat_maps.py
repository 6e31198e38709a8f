"""Heat maps: numbers in cells, and panels that share the rows of a picture evenly."""

from __future__ import annotations

import pytest

from longreach.records.report.plots import MapPanel, Scale, heat_maps, maps
from longreach.records.report.plots.heat_maps import _short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, ".50"),
        (1.0, "1.00"),
        (0.0, "0"),
        (1e-6, "0"),
        (0.001, "1e-3"),
        (-0.5, "-.50"),
        (-1e-6, "0"),
        (-1.0, "-1.00"),
    ],
)
def test_numbers_in_cells(value: float, text: str) -> None:
    assert _short(value) == text


def test_four_panels_stand_two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(heat_maps, "png", lambda made: made.get_size_inches())
    names = tuple(map(str, range(8)))
    panel = MapPanel("a panel", tuple(tuple(i * j / 49 for j in range(8)) for i in range(8)), names, names)
    two, three, four = (maps([panel] * n, "x", "y", Scale("s", 0, 1)) for n in (2, 3, 4))
    assert four[0] == two[0] < three[0] and four[1] > 1.7 * two[1] and three[1] < 1.2 * two[1]
