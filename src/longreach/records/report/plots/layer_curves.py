"""Curves of all layers of a model over keys or distances: a colour a layer, their mean in black."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longreach.records.report.plots.style import figure, name, png, style

COLORS = "viridis"
TICKS = 18


@dataclass(frozen=True)
class LayerPanel:
    """layers: for each layer its shares at the places, side by side, that are named in x."""

    title: str
    xlabel: str
    ylabel: str
    x: tuple[str, ...]
    layers: tuple[tuple[float, ...], ...]


def layer_curves(panels: Sequence[LayerPanel]) -> bytes:
    """PNG of panels side by side, with the same scale of shares."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    count = max(len(p.layers) for p in panels)
    colors = colormaps[COLORS]
    shades = ScalarMappable(Normalize(0, max(1, count - 1)), colors)
    most = max((v for p in panels for layer in p.layers for v in layer), default=0.0)
    step = next(s for s in (0.05, 0.1, 0.25) if most <= 5 * s or s == 0.25)
    ticks = [n * step for n in range(max(1, int(most / step + 0.999)) + 1)]
    with style():
        made = figure(5.2 * len(panels) + 1.0, 3.6)
        grid = made.subplots(1, len(panels), squeeze=False, sharey=True)
        for panel, axes in zip(panels, grid.flat):
            places = range(len(panel.x))
            for n, layer in enumerate(panel.layers):
                axes.plot(
                    places,
                    layer,
                    color=colors(n / max(1, count - 1)),
                    linewidth=1.2,
                    marker="o",
                    markersize=2.5,
                    alpha=0.85,
                )
            mean = [sum(column) / len(column) for column in zip(*panel.layers, strict=True)]
            axes.plot(places, mean, color="black", linewidth=2.2, marker="o", markersize=4, label="mean of layers")
            every = -(-len(panel.x) // TICKS)
            axes.set_xticks(list(places)[::every], [name(t, 14) for t in panel.x[::every]])
            axes.set(title=name(panel.title, 60), xlabel=panel.xlabel)
            axes.set_ylim(-0.03 * ticks[-1], 1.03 * max(ticks[-1], most))
            axes.set_yticks(ticks, [f"{t:.0%}" for t in ticks])
            if any(len(t) > 5 for t in panel.x[::every]):
                for label in axes.get_xticklabels():
                    label.set(rotation=45, ha="right", rotation_mode="anchor")
        grid.flat[0].set_ylabel(panels[0].ylabel)
        grid.flat[0].legend(loc="best")
        if count > 1:
            bar = made.colorbar(shades, ax=list(grid.flat), label="layer", fraction=0.03, pad=0.01)
            bar.locator = MaxNLocator(integer=True)
            bar.update_ticks()
        return png(made)
