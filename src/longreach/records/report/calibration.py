"""Pictures of a calibration: how alike layers are, how much each matters, what a budget is worth."""

from __future__ import annotations

from collections.abc import Sequence

from longreach.records.report.plots import CurvePanel, MapPanel, Scale, Series, curves, maps


def similarity(title: str, layers: Sequence[int], values: Sequence[Sequence[float]], anchors: Sequence[int]) -> bytes:
    """PNG: a row the layer that chooses, a column the one that takes; nothing below the diagonal; * marks anchors."""
    names = tuple(f"{layer}*" if layer in anchors else str(layer) for layer in layers)
    shown = tuple(tuple(v if j >= i else None for j, v in enumerate(row)) for i, row in enumerate(values))
    scale = Scale("weight found of that wanted", 0.0, 1.0, share=True)
    return maps([MapPanel(title, shown, names, names)], "layer that takes", "layer that chooses", scale)


def importance(title: str, values: Sequence[float]) -> bytes:
    """PNG: a point a layer."""
    x = tuple(map(float, range(len(values))))
    line = Series("1 - cos(x, x + attention)", 0, False, x, tuple(values))
    return curves([CurvePanel(title, "layer", "importance", (line,))])


def worth(title: str, best: Sequence[float], even: Sequence[float], bytes_read: Sequence[float]) -> bytes:
    """PNG: of 1, 2, ... anchors, the value of the best and of evenly spaced ones, and the bytes that decoding reads."""
    x = tuple(float(n + 1) for n in range(len(best)))
    found = (Series("best anchors", 1, False, x, tuple(best)), Series("evenly spaced", 2, False, x, tuple(even)))
    read = (Series("bytes read", 3, False, x, tuple(bytes_read)),)
    return curves([
        CurvePanel(title, "anchors", "value, over all", found),
        CurvePanel(title, "anchors", "of dense attention's bytes", read, share=True),
    ])  # fmt: skip
