"""Pictures of a record of attention: heat maps of layers and heads, curves over keys and distances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from longreach.records.report.blocks import Block, Figure
from longreach.records.report.plots import LayerPanel, MapPanel, Scale, layer_curves, maps

KINDS = ("text", "answer")  # of rows
WEIGHT = Scale("share of attention", 0.0, 1.0, dark_is_high=True, share=True)
RETRIEVAL = Scale("retrieval score", 0.0, 1.0, dark_is_high=True, share=True)

Matrix = Sequence[Sequence[float | None] | None]
Panels = Sequence[tuple[str, Matrix]]


def part(layers: Sequence[Any], place: int) -> list[list[float] | None]:
    """[layers][heads] of one of several numbers of each head."""
    return [None if heads is None else [several[place] for several in heads] for heads in layers]


def sunk(results: dict[str, Any]) -> bool:
    """Whether a virtual sink takes anything anywhere."""
    return any(any(map(any, rows["virtual_sink"])) for rows in results["rows"].values())


def figures(results: dict[str, Any], file: str) -> Iterator[Block]:
    """All of them, under names that begin with `file`."""
    rows, last, top = results["rows"], results["last_keys"], results["top_keys"]
    both = [(kind, rows[kind]) for kind in KINDS]

    def heads(name: str, panels: Panels, scale: Scale, caption: str) -> Iterator[Block]:
        drawn = [p for title, values in panels if (p := _panel(title, values, results)) is not None]
        if drawn:
            yield Figure(f"{file}-{name}.png", maps(drawn, "query head", "layer", scale), caption)

    wide = " Layers with a sliding window are marked with it." if any(results["windows"]) else ""
    first = results["sink_keys"]
    sinks = [(f"first {first} keys, {kind} rows", r["sinks"]) for kind, r in both]
    sinks += [(f"virtual sink, {kind} rows", r["virtual_sink"]) for kind, r in both if sunk(results)]
    yield from heads("sinks", sinks, WEIGHT, f"Attention sinks: share on the first {first} positions of the text."
                     f"{wide}")  # fmt: skip
    panels = [(f"last {n} keys, {kind} rows", part(r["windows"], i)) for i, n in enumerate(last) for kind, r in both]
    yield from heads("recent", panels, WEIGHT, "Recency: share on the last keys, the row's own among them.")
    yield Figure(f"{file}-distance.png", layer_curves([_distances(results, kind) for kind in KINDS]), (
        f"Share by distance from the row, means over heads; the first {first} positions of the text are left out, so "
        f"what is missing to 100% is on them."
    ))  # fmt: skip
    most = _nearest(top, 256)
    panels = [(f"top {top[most]} keys, {kind} rows", part(r["tops"], most)) for kind, r in both]
    yield from heads("top", panels, WEIGHT, f"Share on the {top[most]} heaviest keys of each head: what choosing as "
                     f"many could keep at best.")  # fmt: skip
    yield Figure(f"{file}-top-k.png", layer_curves([_tops(results, kind) for kind in KINDS]),
                 "Share on the heaviest keys, means over heads, by how many they are.")  # fmt: skip
    tasks = results["retrieval"]
    yield from heads("retrieval", [(name, task["score"]) for name, task in tasks.items()], RETRIEVAL, (
        "Retrieval heads: share of the answer's tokens for which the head's heaviest key is in the needle and is the "
        "token that comes next (Wu et al., 2024)."
    ))  # fmt: skip
    yield from heads("needle", [(name, task["needle"]) for name, task in tasks.items()], WEIGHT,
                     "Share on the sentence with the answer while the answer is written.")  # fmt: skip
    panels = [(f"{what}, {kind} rows", r[name]) for name, what in (("previous", "to previous"), ("best", "best"))
              for kind, r in both]  # fmt: skip
    yield from heads("queries", panels, _cosines(panels), (
        f"Cosine similarity of queries before rotation: to the previous one, and the best to one of the last "
        f"{results['recent_queries']}."
    ))  # fmt: skip
    panels = [(f"tau {tau:g}, {kind} rows", part(r["match"], i)) for i, tau in enumerate(results["taus"])
              for kind, r in both]  # fmt: skip
    yield from heads("match", panels, Scale("rows with a match", 0.0, 1.0, dark_is_high=True, share=True), (
        f"Share of rows for which MAC-Attention would find a query near enough among the last "
        f"{results['recent_queries']}."
    ))  # fmt: skip
    yield _agreement(results, f"{file}-agreement.png")


def _panel(title: str, values: Matrix, results: dict[str, Any]) -> MapPanel | None:
    """None if no layer was measured."""
    known = next((layer for layer in values if layer is not None), None)
    if known is None:
        return None
    rows = tuple(tuple(layer) if layer is not None else (None,) * len(known) for layer in values)
    return MapPanel(title, rows, _names(results), tuple(map(str, range(len(known)))))


def _names(results: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{n} (w {window})" if window else str(n) for n, window in enumerate(results["windows"]))


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(range(len(values)), key=lambda i: abs(values[i] - wanted))


def _cosines(panels: Panels) -> Scale:
    low = min([0.0, *(v for _, values in panels for layer in values for v in layer or () if v is not None)])
    return Scale("cosine similarity", low, 1.0, dark_is_high=True)


def _distances(results: dict[str, Any], kind: str) -> LayerPanel:
    edges = results["distance_edges"]
    names = tuple(str(a) if b == a + 1 else f"{_short(a)}-{_short(b - 1)}" for a, b in pairwise(edges))
    return LayerPanel(f"{kind} rows", "tokens back", "share of attention", names, _means(results, kind, "distance"))


def _tops(results: dict[str, Any], kind: str) -> LayerPanel:
    names = tuple(map(str, results["top_keys"]))
    return LayerPanel(f"{kind} rows", "heaviest keys", "share of attention", names, _means(results, kind, "tops"))


def _means(results: dict[str, Any], kind: str, name: str) -> tuple[tuple[float, ...], ...]:
    """[layers][places], over heads."""
    layers = results["rows"][kind][name]
    return tuple(tuple(sum(c) / len(c) for c in zip(*heads, strict=True)) for heads in layers)


def _short(count: int) -> str:
    return f"{count / 1024:.0f}K" if count >= 2048 else str(count)


def _agreement(results: dict[str, Any], file: str) -> Block:
    names = _names(results)
    columns = tuple(str(n) for n in range(len(names)))
    titles = {"recall": "same keys", "mass": "weight kept"}
    panels = [MapPanel(f"{title}, {kind} rows", tuple(map(tuple, results["rows"][kind]["agreement"][name])), names,
                       columns) for name, title in titles.items() for kind in KINDS]  # fmt: skip
    k = results["agreement_keys"]
    png = maps(panels, "layer that uses them", "layer that chooses", Scale("share", 0.0, 1.0, dark_is_high=True,
                                                                           share=True))  # fmt: skip
    return Figure(file, png, (
        f"Agreement of layers on the {k} heaviest keys (by KV head; each head of the using layer takes the keys of the "
        f"head that serves it best over all rows). same keys: the share of its own {k} heaviest that are among them. "
        f"weight kept: the weight of the keys chosen for it over that of its own {k} heaviest, for later layers only, "
        f"as Kascade reuses them."
    ))  # fmt: skip
