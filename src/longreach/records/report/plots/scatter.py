"""Quality against bytes read: a point a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longreach.records.report.plots.style import figure, legend, look, name, png, style

MORE = "#f3e3d8"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
ACROSS = 3


@dataclass(frozen=True)
class Point:
    """label: a method. number: its index, which determines its colour. x: bytes over dense's. y, low, high: shares."""

    label: str
    number: int
    dense: bool
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class PointPanel:
    """One set of axes."""

    title: str
    points: tuple[Point, ...]


def points(panels: Sequence[PointPanel], xlabel: str, ylabel: str) -> bytes:
    """PNG. x has a log scale over the range of all panels; the region above 1, without savings, is shaded."""
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    labels = {p.label: p for panel in panels for p in panel.points}
    everything = [p.x for panel in panels for p in panel.points if p.x > 0]
    low, high = min([*everything, 0.5]) / 1.25, max([*everything, 1.0]) * 1.25
    with style():
        made = figure(max(6.4, 4.2 * across), 3.4 * down + 0.22 * len(labels) + 0.3)
        grid = made.subplots(down, across, squeeze=False, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for panel, axes in zip(panels, grid.flat):
            axes.set(xscale="log", xlim=(low, high), ylim=(-0.03, 1.03), title=name(panel.title), xlabel=xlabel)
            ticks = _spread([t for t in TICKS if low < t < high], low, high)
            axes.set_xticks(ticks, [f"{t:.0%}" for t in ticks])
            axes.set_xticks([], minor=True)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
            axes.axvspan(1.0, high, color=MORE, zorder=0)
            axes.text(0.99, 0.02, "reads more than dense ", transform=axes.transAxes, ha="right", color="#8a4b20",
                      size=8, rotation=90 if high < 3 else 0, va="bottom")  # fmt: skip
            for p in sorted(panel.points, key=lambda p: p.dense):
                drawn = _look(p)
                bar = [[max(0, p.y - p.low)], [max(0, p.high - p.y)]]
                axes.errorbar(p.x, p.y, yerr=bar, capsize=3, elinewidth=1, alpha=0.85, **drawn)
            for near in _clusters(panel.points, (high / low) ** 0.09):
                numbers = ", ".join(str(p.number + 1) for p in near)
                right = near[0].x ** 2 > low * high  # of the middle: there is room to the left
                place = (min(p.x for p in near) if right else max(p.x for p in near), max(p.y for p in near))
                axes.annotate(numbers, place, (-7 if right else 7, 5), textcoords="offset points", size=8,
                              ha="right" if right else "left")  # fmt: skip
        for axes in grid[:, 0]:
            axes.set_ylabel(ylabel)
        handles, names = [], []
        for p in sorted(labels.values(), key=lambda p: p.number):
            handles.append(_handle(p))
            names.append(f"{p.number + 1} {name(p.label)}")
        legend(made, handles, names)
        return png(made)


def _handle(p: Point) -> object:
    from matplotlib.lines import Line2D

    return Line2D([], [], **_look(p))


def _look(p: Point) -> dict[str, Any]:
    return {**look(p.number, p.dense), "linestyle": "none", "markersize": 10 if p.dense else 7}


def _clusters(points: Sequence[Point], apart: float) -> list[list[Point]]:
    """Overlapping points share one label. apart: the ratio of x from which points are separate."""
    found: list[list[Point]] = []
    for p in sorted(points, key=lambda p: p.number):
        alike = (c for c in found if max(p.x, c[0].x) / min(p.x, c[0].x) < apart and abs(p.y - c[0].y) < 0.06)
        cluster = next(alike, None)
        if cluster is None:
            found.append([p])
        else:
            cluster.append(p)
    return found


def _spread(ticks: list[float], low: float, high: float) -> list[float]:
    """Those that do not crowd each other on a log axis; 1 is always there."""
    kept = [1.0]
    for tick in ticks:
        if all(max(tick, k) / min(tick, k) > (high / low) ** 0.11 for k in kept):
            kept.append(tick)
    return sorted(kept)
