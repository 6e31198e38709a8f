"""Heat maps: one panel for each method or task, a common colour scale, numbers in cells that are large enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from longreach.records.report.plots.style import figure, name, png, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ANNOTATED = 400  # cells of a panel with numbers in them
WIDEST = 12.5


@dataclass(frozen=True)
class MapPanel:
    """values: a list a row, None where there is nothing. rows, columns: what stands beside them, from the top left.
    stars: values whose number gets a star, of the same shape; none where it is empty."""

    title: str
    values: tuple[tuple[float | None, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    stars: tuple[tuple[bool, ...], ...] = ()


@dataclass(frozen=True)
class Scale:
    """What colours mean: from low to high; root: by the square root, so that small values differ. dark_is_high: whether
    the dark end is the high one. share: numbers are written as percentages."""

    label: str
    low: float
    high: float
    root: bool = False
    dark_is_high: bool = False
    share: bool = False


def maps(panels: Sequence[MapPanel], xlabel: str, ylabel: str, scale: Scale) -> bytes:
    """PNG of all panels, with one ylabel. Row names that neighbours share are written once."""
    rows, columns = max(len(p.rows) for p in panels), max(len(p.columns) for p in panels)
    numbers = rows * columns <= ANNOTATED
    cell_width, cell_height = (0.44, 0.27) if numbers else (max(0.09, 3.2 / columns), max(0.09, 3.2 / rows))
    names = min(3.65, 0.075 * max(len(r) for p in panels for r in p.rows) + 0.35)
    same = all(p.rows == panels[0].rows for p in panels)
    width = max(1.7, min(WIDEST - names, cell_width * columns))
    height = max(0.5, min(9.0, cell_height * rows))
    across = max(1, min(len(panels), int((WIDEST - names) / (width + (0.2 if same else names)))))
    down = -(-len(panels) // across)
    across = -(-len(panels) // down)  # four in two and two rather than three and one
    with style():
        made = figure(
            names + across * (width + (0.2 if same else names)) + 1.1, down * (height + 1.0) + 0.3 + 0.15 * across
        )
        grid = made.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        shown: Any = None
        for place, (panel, axes) in enumerate(zip(panels, grid.flat)):
            shown = _draw(axes, panel, scale, numbers, width)
            first = place % across == 0
            _names(axes, panel, first or not same, rows)
            axes.set_title("\n".join(_lines(panel.title, int(width / 0.08))))
            if place + across >= len(panels):
                axes.set_xlabel(xlabel)
            if first:
                axes.set_ylabel(ylabel)
        shrink = min(1.0, 2.2 / (down * height))
        bar = made.colorbar(shown, ax=list(grid.flat), label=scale.label, shrink=shrink, fraction=0.03, pad=0.01)
        if scale.share:
            bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0%", "25%", "50%", "75%", "100%"])
        return png(made)


def _lines(title: str, most: int) -> list[str]:
    """A title on at most three lines."""
    lines = wrap(name(title, 3 * most), most)
    return lines if len(lines) <= 3 else [*lines[:2], name(" ".join(lines[2:]), most)]


def _draw(axes: Axes, panel: MapPanel, scale: Scale, numbers: bool, width: float) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    values = np.array([[np.nan if v is None else v for v in row] for row in panel.values], dtype=float)
    norm = PowerNorm(0.5 if scale.root else 1.0, scale.low, scale.high, clip=True)
    colors = colormaps["cividis_r" if scale.dark_is_high else "cividis"]
    axes.grid(False)
    axes.patch.set(facecolor="#eeeeee", hatch="///", edgecolor="#bbbbbb")
    shown = axes.imshow(np.ma.masked_invalid(values), cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
    size = min(8.0, 72 * width / len(panel.columns) / 2.5)
    if numbers and size >= 4.5:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = float(np.dot(colors(norm(value))[:3], (0.299, 0.587, 0.114))) < 0.5
                star = "*" if panel.stars and panel.stars[row][column] else ""
                text = f"{value * 100:.0f}" if scale.share else _short(value)
                _write(axes, row, column, text + star, size, dark)
    return shown


def _write(axes: Axes, row: int, column: int, text: str, size: float, dark: bool) -> None:
    axes.text(column, row, text, ha="center", va="center", size=size, color="white" if dark else "black")


def _short(value: float) -> str:
    if value < 0:
        text = _short(-value)
        return text if text == "0" else f"-{text}"
    text = f"{value:.2f}" if value >= 0.005 else "0" if value < 5e-5 else f"{value:.0e}".replace("e-0", "e-")
    return text.removeprefix("0") if value < 1 and len(text) > 1 and "e" not in text else text


def _names(axes: Axes, panel: MapPanel, named: bool, rows: int) -> None:
    """All names if they fit, else every n-th."""
    for axis, texts, most in ((axes.yaxis, panel.rows, 36), (axes.xaxis, panel.columns, 24)):
        step = -(-len(texts) // most)
        places = list(range(0, len(texts), step))
        shown = [name(texts[i]) for i in places] if named or axis is axes.xaxis else [""] * len(places)
        axis.set_ticks(places, shown)
    if max(len(t) for t in panel.columns) > 4:
        for label in axes.get_xticklabels():
            label.set(rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
