"""Weights of the memory levels of a model with MKA's layers, by layer and by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.records.report.blocks import Block, Cell, Figure, Text, table
from longreach.records.report.format import number
from longreach.records.report.plots import CurvePanel, Series, curves
from longreach.records.report.reading import Record
from longreach.records.report.routing_shape import LEVEL_NAMES

SUMMED = ("lambda", "weight")  # quantities by position; gates have none


def routing(record: Record, file: str) -> list[Block]:
    """Tables by layer and by position, and curves of both."""
    results = record["results"]
    layers, names = list(results["layers"].values()), level_names(results)
    head = [f"{quantity}, {name}" for quantity in (*SUMMED, "gate") for name in names]
    rows: list[list[str | Cell]] = [
        [layer, *(number(x) for quantity in (*SUMMED, "gate") for x in one[quantity])]
        for layer, one in results["layers"].items()
    ]
    rows.append(["mean", *(number(x) for quantity in (*SUMMED, "gate")
                           for x in over_layers([one[quantity] for one in layers]))])  # fmt: skip
    by = [by_position(results, quantity) for quantity in SUMMED]
    parts: list[list[str | Cell]] = [
        [f"{part['start']}-{part['stop'] - 1}", *(number(x) for mean in means for x in mean)]
        for part, *means in zip(results["positions"], *by, strict=True)
    ]
    files = ", ".join(f"{f['name']} ({f['tokens']} tokens)" for f in record["files"])
    options = record["options"]
    return [
        table("Weights of levels by layer", ["layer", *head], rows),
        table("Weights of levels by position, mean over layers", ["tokens", *head[: 2 * len(names)]], parts),
        Text(f"{options['variant']}, routing={options['routing']}. Texts: {files}; {results['tokens']} tokens were "
             f"read. lambda: the router's weights, which sum to 1. weight: start + gate (lambda - start), by which a "
             f"layer mixes its levels; start is the layer before its conversion. A level without keys for a token has "
             f"weight 0."),
        Figure(f"{file}-levels.png", curves([panel(results, quantity) for quantity in SUMMED
                                             for panel in (_by_layer, _by_position)]),
               "Mean lambda and mean weight of each level, by layer, and by position in a window (mean over layers)."),
    ]  # fmt: skip


def level_names(results: dict[str, Any]) -> list[str]:
    """Names of the levels in use."""
    return [LEVEL_NAMES[level] for level in results["levels"]]


def over_layers(values: Sequence[Sequence[float]]) -> list[float]:
    """Means [levels] of values [layers][levels]."""
    return [sum(column) / len(column) for column in zip(*values, strict=True)]


def by_position(results: dict[str, Any], quantity: str) -> list[list[float]]:
    """Means [parts][levels] over layers."""
    layers = [layer["by_position"][quantity] for layer in results["layers"].values()]
    return [over_layers(part) for part in zip(*layers, strict=True)]


def _by_layer(results: dict[str, Any], quantity: str) -> CurvePanel:
    x = [float(layer) for layer in results["layers"]]
    y = [layer[quantity] for layer in results["layers"].values()]
    return CurvePanel(f"{quantity} by layer", "layer", quantity, _series(results, x, y), share=quantity == "lambda")


def _by_position(results: dict[str, Any], quantity: str) -> CurvePanel:
    x = [(part["start"] + part["stop"]) / 2 for part in results["positions"]]
    series = _series(results, x, by_position(results, quantity))
    return CurvePanel(f"{quantity} by position", "position (tokens)", quantity, series, share=quantity == "lambda")


def _series(results: dict[str, Any], x: Sequence[float], y: Sequence[Sequence[float]]) -> tuple[Series, ...]:
    """A curve a level. y: [places][levels]."""
    columns = zip(results["levels"], level_names(results), zip(*y, strict=True), strict=True)
    return tuple(Series(name, level, False, tuple(x), values, plain=True) for level, name, values in columns)
