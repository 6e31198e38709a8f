"""Pictures: valid, not blank, of a size to be looked at, whatever the names and numbers."""

from __future__ import annotations

import io
import math
import struct
import sys
import warnings

import numpy as np
import pytest

from longreach.errors import Unsupported
from longreach.records.report.plots import (
    CurvePanel,
    MapPanel,
    Point,
    PointPanel,
    Scale,
    Series,
    check_installed,
    curves,
    maps,
    points,
)
from longreach.records.report.plots.scatter import _clusters
from longreach.records.report.plots.style import look, name
from tests.tiers import swept

NAMES = ["dense", "$x^2_", "_hidden", "日本語 \U0001f600", "a\nb", "w" * 300, "oracle_top_k k=0.025 dense_layers=[0]"]
SCORE = Scale("score", 0.0, 1.0, share=True)


def pixels(png: bytes) -> np.ndarray:
    """The picture as numbers in [0, 1]; asserts that it is one, and of a size that a page can show."""
    image = pytest.importorskip("matplotlib.image")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    found = image.imread(io.BytesIO(png))
    assert found.shape[:2] == (height, width) and 300 < width < 2600 and 150 < height < 6000
    return found[..., :3]


def has(png: bytes, color: str, least: int = 20) -> bool:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(pixels(png) - wanted).max(-1) < 0.03).sum()) >= least


@pytest.fixture(autouse=True)
def strict() -> object:
    """A glyph that is missing, a label that is skipped or a layout that fails is a warning of matplotlib."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_points_of_any_name_and_place() -> None:
    some = [Point(n, i, i == 0, 1.2 * 0.3**i, i / 6, max(0, i / 6 - 0.1), min(1, i / 6 + 0.1))
            for i, n in enumerate(NAMES)]  # fmt: skip
    png = points([PointPanel("4096 tokens", tuple(some))] * 4, "bytes", "score")
    assert pixels(png).std() > 0.05 and has(png, "#0072B2") and has(png, "#D55E00")
    assert png == points([PointPanel("4096 tokens", tuple(some))] * 4, "bytes", "score")


def test_points_on_each_other_share_a_label() -> None:
    at = [(1.0, 0.5), (1.02, 0.51), (0.1, 0.5), (1.0, 0.9)]
    some = [Point(str(n), n, n == 0, x, y, y, y) for n, (x, y) in enumerate(at)]
    assert [[p.number for p in c] for c in _clusters(some, 1.1)] == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("rows", "columns", "panels"), swept([(1, 1, 1), (7, 5, 8), (80, 64, 3), (2, 40, 2), (32, 1, 1)], 2)
)
def test_maps_of_any_size(rows: int, columns: int, panels: int) -> None:
    values = tuple(tuple((r + c) % 7 / 6 if (r + c) % 5 else None for c in range(columns)) for r in range(rows))
    labels = tuple(NAMES[r % 7] for r in range(rows))
    made = [MapPanel(NAMES[p % 7], values, labels, tuple(map(str, range(columns)))) for p in range(panels)]
    assert pixels(maps(made, "depth", "method", SCORE)).std() > 0.02


def test_a_cell_has_the_colour_of_its_value() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    def one(value: float | None, scale: Scale) -> bytes:
        return maps([MapPanel("t", ((value,),), ("r",), ("c",))], "x", "y", scale)

    lowest, highest = to_hex(colormaps["cividis"](0.0)), to_hex(colormaps["cividis"](1.0))
    assert has(one(0.0, SCORE), lowest, 2000) and has(one(1.0, SCORE), highest, 2000)
    error = Scale("error", 0.0, 4.0, root=True, dark_is_high=True)
    assert has(one(4.0, error), lowest, 2000) and has(one(0.0, error), highest, 2000)
    assert has(one(1.0, error), to_hex(colormaps["cividis"](0.5)), 2000)  # the root of a quarter is a half
    assert has(one(None, SCORE), "#eeeeee", 500)


def test_numbers_stand_in_cells_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def square(size: int) -> bytes:
        flat = tuple(tuple(0.5 for _ in range(size)) for _ in range(size))
        return maps([MapPanel("t", flat, ("r",) * size, ("c",) * size)], "x", "y", SCORE)

    few, many = square(4), square(30)
    monkeypatch.setattr("longreach.records.report.plots.heat_maps._write", lambda *a: None)
    assert square(4) != few and square(30) == many


def test_curves_with_gaps_marks_and_logs() -> None:
    x = tuple(map(float, range(40)))
    broken = tuple(math.nan if i % 9 == 0 else 10.0**-i for i in range(40))
    some = tuple(Series(n, i, i == 0, x, broken, mark=4.0) for i, n in enumerate(NAMES))
    panels = [CurvePanel("a", "step", "KL (nats)", some, log=True), CurvePanel("b", "t", "share", some, share=True)]
    png = curves(panels)
    assert pixels(png).std() > 0.05 and has(png, "#0072B2")
    nothing = Series("m", 1, False, (0.0, 1.0), (math.nan, math.nan))
    assert pixels(curves([CurvePanel("a", "x", "y", (nothing,), log=True)])).std() > 0.01


def test_settings_of_the_user_do_not_matter_and_stay() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    panel = [CurvePanel("a", "x", "y", (Series("m", 1, False, (0.0, 1.0), (0.0, 1.0)),))]
    before = curves(panel)
    with matplotlib.rc_context({"figure.facecolor": "red", "font.size": 30, "axes.grid": False}):
        assert curves(panel) == before
        assert matplotlib.rcParams["figure.facecolor"] == "red"


def test_no_two_methods_look_alike() -> None:
    looks = [tuple(look(n, n == 0).values()) for n in range(24)]
    assert len(set(looks)) == 24


def test_names_are_what_the_font_can_draw() -> None:
    assert name("a\n日本\u202e") == "a ???" and len(name("w" * 300)) == 44
    assert name("Größe µ Ω Ж") == "Größe µ Ω Ж"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match=r"pip install 'longreach\[report\]'"):
        check_installed()
