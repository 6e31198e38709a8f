"""Stacked bars: a panel a set of measurements, a bar a measurement, a colour a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longreach.records.report.plots.style import COLORS, DENSE, figure, legend, name, png, style


@dataclass(frozen=True)
class Bar:
    """parts: name -> value, from the bottom up."""

    label: str
    parts: dict[str, float]


@dataclass(frozen=True)
class BarPanel:
    """One set of axes. line: a value that all bars are compared with."""

    title: str
    ylabel: str
    bars: tuple[Bar, ...]
    line: float | None = None


def bars(panels: Sequence[BarPanel]) -> bytes:
    """PNG. Parts of the same name have the same colour in all panels; at most as many names as there are colours."""
    names = list(dict.fromkeys(part for panel in panels for bar in panel.bars for part in bar.parts))
    colors = dict(zip(names, COLORS, strict=False))
    handles = {}
    with style():
        made = figure(4.4 * len(panels), 3.8)
        for panel, axes in zip(panels, made.subplots(1, len(panels), squeeze=False).flat):
            axes.set(title=name(panel.title, 60), ylabel=panel.ylabel)
            axes.grid(axis="x", visible=False)
            for place, bar in enumerate(panel.bars):
                bottom = 0.0
                for part, value in bar.parts.items():
                    handles[part] = axes.bar(place, value, 0.62, bottom=bottom, color=colors[part], linewidth=0)
                    bottom += value
                axes.text(place, bottom, f"{bottom:.2f}", ha="center", va="bottom", fontsize=8)
            if panel.line is not None:
                axes.axhline(panel.line, color=DENSE, linewidth=1)
            axes.set_xticks(range(len(panel.bars)), [bar.label for bar in panel.bars])
        legend(made, [handles[part] for part in names], names)
        return png(made)
