"""Pictures of a record of `longreach sampling`: errors by bytes and by layer, geometry, mass of the best keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longreach.records.report.blocks import Block, Figure
from longreach.records.report.format import mean
from longreach.records.report.plots import CurvePanel, LayerPanel, Series, curves, layer_curves
from longreach.records.report.reading import Record
from longreach.records.report.sampling_lines import (
    CONTROLS,
    GROUP,
    OWN,
    bytes_read,
    label_of,
    lines,
    method_of,
    presets,
)

ESTIMATORS = {"top_k": "top-k", "iid": "iid draws", "systematic": "systematic"}


def figures(record: Record, file: str) -> Iterator[Block]:
    """All of them, under names that begin with `file`."""
    results = record["results"]
    panels = [
        _by_bytes(results, "methods", [x for x in lines(results) if x not in CONTROLS]),
        _by_bytes(results, "magicpig and its controls", [x for x in lines(results) if x.startswith("magicpig")]),
    ]
    yield Figure(f"{file}-bytes.png", curves(panels), (
        "Mean error by bytes read, over dense attention's. Oracles read keys for their scores too, which is not in "
        "their bytes here."
    ))  # fmt: skip
    bits, tables = _preset(results)
    yield Figure(f"{file}-layers.png", curves([_methods_by_layer(results), _estimators_by_layer(results)]), (
        f"Mean error by layer. Left: magicpig with {bits} bits and {tables} tables, and exact top-k of as many keys. "
        f"Right: estimates with exact scores, {_read(results)} of the keys."
    ))  # fmt: skip
    yield Figure(f"{file}-estimators.png", curves([_estimates(results, x) for x in ("mean", "median")]), (
        "Error of estimates with exact scores by the share of keys read, each query head its own keys (MagicPIG, "
        "Figures 3 to 5)."
    ))  # fmt: skip
    yield Figure(f"{file}-geometry.png", curves(_geometry(results)), (
        "Directions and sizes by layer (MagicPIG, Figures 9 to 11)."
    ))  # fmt: skip
    yield Figure(f"{file}-mass.png", layer_curves([_mass(results, x) for x in ("all", "without_first")]), (
        "Attention on the best keys of a query head, means over heads, of all keys and with the first 4 left out "
        "(MagicPIG, Figure 2)."
    ))  # fmt: skip


def _preset(results: dict[str, Any]) -> tuple[int, int]:
    """The middle one: (10, 150) of all."""
    known = presets(results)
    return known[len(known) // 2]


def _line(label: str, number: int, x: Sequence[float], y: Sequence[float | None]) -> Series:
    known = tuple(math.nan if value is None else value for value in y)
    return Series(label, number + 1, False, tuple(x), known, plain=True)  # 0 is dense attention's colour


def _by_bytes(results: dict[str, Any], title: str, names: Sequence[str]) -> CurvePanel:
    found, order = lines(results), list(lines(results))
    series = [_line(name, order.index(name), [bytes_read(x) for x in found[name]], [x["mean"] for x in found[name]])
              for name in names]  # fmt: skip
    return CurvePanel(title, "bytes read over dense attention's", "error", tuple(series), log=True, shares=True)


def _layer_means(layers: Sequence[Sequence[float] | None]) -> list[float | None]:
    return [None if layer is None else mean(layer) for layer in layers]


def _layers(title: str, ylabel: str, found: Mapping[str, Sequence[float | None]], first: int = 0) -> CurvePanel:
    series = [_line(name, first + n, tuple(map(float, range(len(values)))), values)
              for n, (name, values) in enumerate(found.items())]  # fmt: skip
    return CurvePanel(title, "layer", ylabel, tuple(series))


def _methods_by_layer(results: dict[str, Any]) -> CurvePanel:
    bits, tables = _preset(results)
    label = label_of(results, GROUP, bits, tables)
    found = {name: _layer_means(method_of(results, name, bits, tables)["errors"]) for name in (OWN, GROUP)}
    found |= {"top-k, as many keys": _layer_means(results["top_k_same_keys"][label]["errors"]),
              "top-k in place of the sample": _layer_means(results["top_k_in_place"][label]["errors"])}  # fmt: skip
    return _layers(f"magicpig, {bits} bits, {tables} tables", "error", found)


def _near(results: dict[str, Any], name: str) -> int:
    """The budget that reads nearest to 5%."""
    read = results["estimators"][name]["read"]
    return min(range(len(read)), key=lambda n: abs(read[n] - 0.05))


def _read(results: dict[str, Any]) -> str:
    return ", ".join(f"{title} {results['estimators'][name]['read'][_near(results, name)]:.1%}"
                     for name, title in ESTIMATORS.items())  # fmt: skip


def _estimators_by_layer(results: dict[str, Any]) -> CurvePanel:
    found = {}
    for name, title in ESTIMATORS.items():
        place = _near(results, name)
        found[title] = [None if layer is None else mean([head[place] for head in layer])
                        for layer in results["estimators"][name]["errors"]]  # fmt: skip
    return _layers("estimates with exact scores", "error", found, 4)


def _estimates(results: dict[str, Any], column: str) -> CurvePanel:
    series = [_line(title, n, results["estimators"][name]["read"], results["estimators"][name][column])
              for n, (name, title) in enumerate(ESTIMATORS.items())]  # fmt: skip
    return CurvePanel(f"{column} error", "keys read", "error", tuple(series), log=True, shares=True)


def _geometry(results: dict[str, Any]) -> list[CurvePanel]:
    found, ranges = results["geometry"], results["ranges"]
    cosines: dict[str, Sequence[float | None]] = {
        "first keys of prompts, least": _least(found["first_keys"]["min"]),
        "first keys of other tokens, least": _least(found["first_keys_other"]["min"]),
        "mean keys of prompts, least": _least(found["mean_keys"]["min"]),
        "first key and mean key": _layer_means(found["first_to_mean"]),
    }
    spread: dict[str, Sequence[float | None]] = {
        "log |v - o|": _layer_means(ranges["value_distance"]), "logits": _layer_means(ranges["logits"]),
    }  # fmt: skip
    norms: dict[str, Sequence[float | None]] = {
        "first value over median value": _layer_means(found["first_value_norm"])
    }
    return [_layers("cosines of keys", "cosine", cosines), _layers("range over keys, 5% to 95%", "range", spread, 4),
            _layers("norm of the first value", "ratio", norms, 6)]  # fmt: skip


def _least(layers: Sequence[Sequence[float] | None]) -> list[float | None]:
    return [None if not layer else min(layer) for layer in layers]


def _mass(results: dict[str, Any], name: str) -> LayerPanel:
    shown = tuple(f"{share * 100:g}%" for share in results["shares"])
    layers = tuple(tuple(sum(column) / len(column) for column in zip(*layer, strict=True))
                   for layer in results["mass"][name] if layer is not None)  # fmt: skip
    title = {"all": "all keys", "without_first": "first 4 keys left out"}[name]
    return LayerPanel(title, "best keys", "share of attention", shown, layers)
