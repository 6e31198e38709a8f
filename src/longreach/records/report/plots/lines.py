"""Curves over positions or steps: a panel a quantity, a curve a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longreach.records.report.plots.style import figure, legend, look, name, png, style

ACROSS = 2
TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of shares


@dataclass(frozen=True)
class Series:
    """label: a method, or, where `plain`, anything; number: its place among all, told with methods.

    mark: an x on the curve at which something happened.
    """

    label: str
    number: int
    dense: bool
    x: tuple[float, ...]
    y: tuple[float, ...]
    mark: float | None = None
    plain: bool = False


@dataclass(frozen=True)
class CurvePanel:
    """One set of axes. log: of y. doubling: x by powers of two. share: y from 0 to 1, as percentages. shares: x are
    shares, as percentages on a log scale."""

    title: str
    xlabel: str
    ylabel: str
    series: tuple[Series, ...]
    log: bool = False
    steps: bool = False
    share: bool = False
    doubling: bool = False
    shares: bool = False


def curves(panels: Sequence[CurvePanel]) -> bytes:
    """PNG. Values that are no finite numbers are gaps."""
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    known = {s.label: s for panel in panels for s in panel.series}
    with style():
        made = figure(5.4 * across + 1.2 * (across == 1), 3.2 * down + 0.22 * len(known) + 0.2)
        grid = made.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for panel, axes in zip(panels, grid.flat):
            if all(float(x).is_integer() for s in panel.series for x in s.x):  # positions and tokens are counted
                axes.locator_params(axis="x", integer=True)
            axes.set(title=name(panel.title, 60), xlabel=panel.xlabel, ylabel=panel.ylabel)
            if panel.log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the default's is a formula
                axes.yaxis.set_minor_formatter(lambda value, _: "")
            if panel.doubling:
                ticks = sorted({x for s in panel.series for x in s.x})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
                axes.set_xticks([], minor=True)
            if panel.shares:
                known_x = [x for s in panel.series for x in s.x if x > 0] or [1.0]
                axes.set_xscale("log")
                axes.set_xlim(min(known_x) / 1.2, max(known_x) * 1.2)
                axes.set_xticks([x for x in TICKS if min(known_x) / 1.2 < x < max(known_x) * 1.2])
                axes.xaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
                axes.set_xticks([], minor=True)
            if panel.share:
                axes.set_ylim(-0.03, 1.03)
                axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
            for s in panel.series:
                drawn = look(s.number, s.dense)
                few = len(s.x) <= 24
                axes.plot(s.x, s.y, color=drawn["color"], linestyle=drawn["linestyle"], linewidth=1.4, markersize=4,
                          marker=drawn["marker"] if few else "", alpha=0.9,
                          drawstyle="steps-post" if panel.steps else "default")  # fmt: skip
                if s.mark is not None and s.mark in s.x:
                    axes.plot([s.mark], [s.y[s.x.index(s.mark)]], color=drawn["color"], marker="X", markersize=10,
                              markeredgecolor="white", linestyle="none", zorder=5)  # fmt: skip
        order = sorted(known.values(), key=lambda s: s.number)
        legend(made, [_handle(s) for s in order], [_label(s) for s in order])
        return png(made)


def _label(s: Series) -> str:
    return name(s.label) if s.plain else f"{s.number + 1} {name(s.label)}"


def _handle(s: Series) -> object:
    from matplotlib.lines import Line2D

    return Line2D([], [], linewidth=1.4, markersize=5, **look(s.number, s.dense))
