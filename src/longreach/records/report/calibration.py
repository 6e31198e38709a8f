"""Pictures of a calibration: similarity of layers, importance of each, and quality by budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longreach.records.report.plots import CurvePanel, MapPanel, Scale, Series, curves, maps

Kept = Mapping[str, Sequence[float] | None]


def similarity(title: str, layers: Sequence[int], values: Sequence[Sequence[float]], anchors: Sequence[int]) -> bytes:
    """PNG: a row the layer that chooses, a column the one that takes; nothing below the diagonal; * marks anchors."""
    title = f"{title}; anchors {', '.join(map(str, anchors))}"
    names = tuple(f"{layer}*" if layer in anchors else str(layer) for layer in layers)
    shown = tuple(tuple(v if j >= i else None for j, v in enumerate(row)) for i, row in enumerate(values))
    scale = Scale("weight found of that wanted", 0.0, 1.0, share=True)
    return maps([MapPanel(title, shown, names, names)], "layer that takes", "layer that chooses", scale)


def importance(title: str, values: Sequence[float]) -> bytes:
    """PNG: a point a layer."""
    x = tuple(map(float, range(len(values))))
    line = _line("1 - cos(x, x + attention)", 0, x, values)
    return curves([CurvePanel(title, "layer", "importance", (line,))])


def worth(title: str, best: Sequence[float], even: Sequence[float], bytes_read: Sequence[float]) -> bytes:
    """PNG: of 1, 2, ... anchors, the value of the best and of evenly spaced ones, and the bytes that decoding reads."""
    x = tuple(float(n + 1) for n in range(len(best)))
    found = (_line("best anchors", 0, x, best), _line("evenly spaced", 1, x, even))
    read = (_line("bytes read", 2, x, bytes_read),)
    return curves([
        CurvePanel(title, "anchors", "value, over all", found),
        CurvePanel(title, "anchors", "of dense attention's bytes", read, share=True),
    ])  # fmt: skip


def top_mass(title: str, values: Sequence[Sequence[float]]) -> bytes:
    """PNG: a row a layer, a column a query head: the weight of its 256 heaviest keys."""
    rows, columns = (tuple(map(str, range(n))) for n in (len(values), len(values[0])))
    panel = MapPanel(title, tuple(map(tuple, values)), rows, columns)
    return maps([panel], "query head", "layer", Scale("weight of the top 256 keys", 0.0, 1.0, share=True))


def kept(title: str, xlabel: str, x: Sequence[float], found: Mapping[str, Kept], *, doubling: bool = False) -> bytes:
    """PNG: for each way of choosing keys the weight that they hold, and the error of the output, by x."""
    panels = []
    for name, ylabel in (("weight", "weight on the keys attended to"), ("error", "error of the output")):
        lines = []
        for number, (label, values) in enumerate(found.items()):
            numbers = values[name]
            if numbers is not None:
                lines.append(_line(label, number, x, numbers))
        panels.append(CurvePanel(title, xlabel, ylabel, tuple(lines), doubling=doubling))
    return curves(panels)


def _line(label: str, number: int, x: Sequence[float], y: Sequence[float]) -> Series:
    return Series(label, number + 1, False, tuple(x), tuple(y), plain=True)  # 0 is that of dense attention


def sampling(
    title: str,
    heads: Sequence[Sequence[float]],
    pairs: Sequence[tuple[str, float, float]],
    chosen: Sequence[tuple[float, float]],
) -> bytes:
    """PNG: expected error of sampled attention by layer, a curve a KV head; and error against bytes read.

    heads: of each layer, the error of each KV head; for more than EACH heads the least, mean and largest are drawn.
    pairs: (name, bytes over dense attention's, mean error) of pairs of bits and tables in all layers. chosen: (bytes,
    error) of the best choices by layer.
    """
    x = tuple(map(float, range(len(heads))))
    each = {f"KV head {g}": [row[g] for row in heads] for g in range(len(heads[0]))}
    if len(each) > EACH:
        each = {"least head": [min(row) for row in heads], "mean": [sum(row) / len(row) for row in heads],
                "largest head": [max(row) for row in heads]}  # fmt: skip
    layers = tuple(_line(label, n, x, y) for n, (label, y) in enumerate(each.items()))
    ascending = sorted(pairs, key=lambda pair: pair[1])
    lines = [_line("one pair in all layers", len(each), *zip(*((b, e) for _, b, e in ascending), strict=True))]
    if chosen:
        lines.append(_line("pairs chosen by layer", len(each) + 1, *zip(*sorted(chosen), strict=True)))
    return curves([
        CurvePanel(title, "layer", "expected error, chosen pairs", layers),
        CurvePanel(title, "bytes over dense attention's", "expected error, mean over layers", tuple(lines)),
    ])  # fmt: skip


EACH = 8  # curves of heads that can be told from each other
