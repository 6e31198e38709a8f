"""Pictures of the measurements behind reuse of attention, as in MAC-Attention's paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from longreach.records.report.plots import CurvePanel, LayerPanel, MapPanel, Scale, Series, curves, layer_curves, maps

MOST_MAPS = 6  # the paper shows maps of this many layers
Points = Sequence[Mapping[str, float | None] | None]
Grid = Sequence[Sequence[float | None]]


def by_layer(title: str, xlabel: str, x: Sequence[Any], shares: Mapping[str, Sequence[Sequence[float]]]) -> bytes:
    """PNG, Fig. 5: a panel for each of the shares [layers][x], by their name. Layers are those of full attention."""
    names = tuple(f"{v:g}" for v in x)
    return layer_curves([
        LayerPanel(f"{title}: {name}", xlabel, name, names, tuple(map(tuple, values)))
        for name, values in shares.items()
    ])  # fmt: skip


def by_gap(
    title: str, layers: Sequence[int], edges: Sequence[int], bands: Sequence[int], values: Sequence[Grid]
) -> bytes:
    """PNG, Fig. 4: error [layers][bands][bins] of the output by how far back the row is that is reused, of some layers;
    bins from edges[i] to edges[i + 1] - 1."""
    count = min(MOST_MAPS, len(layers))
    chosen = sorted({(len(layers) - 1) * i // max(1, count - 1) for i in range(count)})
    names = tuple(str(band) for band in bands)
    panels = [
        MapPanel(f"{title}: layer {layers[n]}", tuple(map(tuple, values[n])), names, tuple(map(str, edges[:-1])))
        for n in chosen
    ]
    return maps(panels, "gap, from", "band", _errors([v for n in chosen for row in values[n] for v in row]))


def by_window_and_band(
    title: str, windows: Sequence[int], bands: Sequence[int], error: Grid, read: Grid
) -> dict[str, bytes]:
    """PNGs, Fig. 10: the error of outputs, and the share of keys that is read, [bands][windows]."""
    rows, columns = tuple(map(str, bands)), tuple(map(str, windows))
    shares = Scale("keys read", 0.0, 1.0, share=True)
    return {
        name: maps([MapPanel(title, tuple(map(tuple, grid)), rows, columns)], "window", "band", scale)
        for name, grid, scale in (("error", error, _errors([v for row in error for v in row])), ("read", read, shares))
    }


def trade(title: str, taus: Sequence[float], found: Mapping[str, Points]) -> bytes:
    """PNG, Fig. 9 with errors in the place of scores: by tau under each scale."""
    return curves([
        CurvePanel(title, "tau", "error of the output", _lines(taus, found, lambda p: p["error"])),
        CurvePanel(title, "tau", "keys read", _lines(taus, found, lambda p: 1 - p["skipped"]), share=True),
    ])  # fmt: skip


def ways(
    title: str, accepted: Sequence[float], at_accepted: Mapping[str, Points],
    skipped: Sequence[float], at_skipped: Mapping[str, Points],
) -> bytes:  # fmt: skip
    """PNG: ways of matching at equal acceptance, and at an equal share of keys that are not read."""
    every, some = tuple(accepted), tuple(skipped)
    return curves([
        CurvePanel(title, "accepted", "error of the reused", _lines(every, at_accepted, lambda p: p["error_reused"])),
        CurvePanel(title, "accepted", "keys not read", _lines(every, at_accepted, lambda p: p["skipped"]), share=True),
        CurvePanel(title, "keys not read", "error of the output", _lines(some, at_skipped, lambda p: p["error"])),
    ])  # fmt: skip


def drift(title: str, edges: Sequence[int], found: Mapping[str, Mapping[str, Any]]) -> bytes:
    """PNG: errors and divergence by decode step, a line a method."""
    middle = [(a + b) / 2 for a, b in pairwise(edges)]
    error = {name: [sum(x) / len(x) for x in m["error"]] for name, m in found.items()}
    panels = []
    for ylabel, values in (("error of attention", error), ("KL, nats", {n: m["kl"] for n, m in found.items()})):
        lines = tuple(_line(name, i, middle, y) for i, (name, y) in enumerate(values.items()))
        panels.append(CurvePanel(title, "decode step", ylabel, lines))
    return curves(panels)


def depths(title: str, found: Mapping[str, Mapping[str, Any]]) -> bytes:
    """PNG: the share of entries by how many reuses they descend from, a row a layer."""
    panels = []
    for name, m in found.items():
        rows = [(str(n), tuple(row)) for n, row in enumerate(m["depths"]) if row is not None]
        columns = tuple(map(str, m["depth_bins"]))
        panels.append(MapPanel(f"{title}: {name}", tuple(v for _, v in rows), tuple(n for n, _ in rows), columns))
    return maps(panels, "reuses, from", "layer", Scale("share of entries", 0.0, 1.0, share=True))


def _errors(values: Sequence[float | None]) -> Scale:
    most = max((v for v in values if v is not None), default=0.0)
    return Scale("error of the output", 0.0, max(most, 1e-6), root=True, dark_is_high=True)


def _lines(x: Sequence[float], found: Mapping[str, Points], of: Any) -> tuple[Series, ...]:
    made = []
    for number, (name, points) in enumerate(found.items()):
        pairs = [(a, of(p)) for a, p in zip(x, points, strict=True) if p is not None and of(p) is not None]
        made.append(_line(name, number, [a for a, _ in pairs], [b for _, b in pairs]))
    return tuple(made)


def _line(label: str, number: int, x: Sequence[float], y: Sequence[float]) -> Series:
    return Series(label, number + 1, False, tuple(x), tuple(y), plain=True)
