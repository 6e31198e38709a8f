"""Reads, sampled shares and error bars of methods that sample keys, as records keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.runtime import Report

BYTES = ("search_bytes", "attention_bytes")
MEMORY = ("table_bytes", "kv_bytes")
BARS = ("relative_error", "redone")
BY_LAYER = ("sampled_head", "sampled_group", "overflowed")


def sampling_of(report: Report) -> dict[str, Any] | None:
    """Of the layers with tables in decode steps: bytes, and means over KV heads by layer; None without such a layer.

    dense_bytes: those that dense attention reads in these layers. rows: those of sequences with keys in the tables, of
    which the means are. table_bytes, kv_bytes: memory that a sequence takes in these layers, for the tables with their
    centres, and for keys and values.
    """
    layers = [r for r in report.layers if r.phase == "decode" and r.notes and "search_bytes" in r.notes]
    if not layers:
        return None
    notes = [r.notes for r in layers if r.notes]
    return {
        "layers": [r.layer for r in layers],
        **{name: sum(each[name] for each in notes) for name in BYTES},
        "dense_bytes": sum(r.dense_bytes for r in layers),
        "rows": notes[0]["sampled_rows"],
        **{name: [sum(each[name]) / len(each[name]) for each in notes] for name in BY_LAYER},
        **{name: sum(each[f"{name}_per_sequence"] for each in notes) for name in MEMORY},
    }


def mean_of(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Results of `sampling_of` for several prompts as one: shares of dense attention's bytes, and means by layer.

    search and attention make up all that the layers read but for error bars, whose bytes `mean_bars` gives.
    tables_over_kv: memory of the tables over that of keys and values, of all these layers and prompts together. None
    without a prompt whose keys were in the tables.
    """
    rows = sum(each["rows"] for each in found)
    if not rows:
        return None
    search, attention, dense, tables, kv = (
        sum(each[name] for each in found) for name in (*BYTES, "dense_bytes", *MEMORY)
    )
    return {
        "layers": found[0]["layers"],
        "search": search / dense,
        "attention": attention / dense,
        **{
            name: [
                sum(each["rows"] * share for each, share in zip(found, layer, strict=True)) / rows
                for layer in zip(*(each[name] for each in found), strict=True)
            ]
            for name in BY_LAYER
        },
        "tables_over_kv": tables / kv,
    }


def bars_of(report: Report) -> dict[str, Any] | None:
    """Error bars of decode steps, by layer; None without a layer that has some.

    relative_error, redone: as in `methods.error_bars.summary`, means over KV heads. rows: that these are means of.
    bytes: read to estimate errors; None if the method does not count them separately. dense_bytes: those that dense
    attention reads in these layers.
    """
    layers = [r for r in report.layers if r.phase == "decode" and r.notes and "relative_error" in r.notes]
    if not layers:
        return None
    notes = [r.notes for r in layers if r.notes]
    counted = all("error_bar_bytes" in each for each in notes)
    return {
        "layers": [r.layer for r in layers],
        "rows": [each.get("sampled_rows", r.rows) for r, each in zip(layers, notes, strict=True)],
        **{name: [sum(each[name]) / len(each[name]) for each in notes] for name in BARS},
        "bytes": sum(each["error_bar_bytes"] for each in notes) if counted else None,
        "dense_bytes": sum(r.dense_bytes for r in layers),
    }


def mean_bars(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Results of `bars_of` for several prompts as one: means by layer over all rows; None without a row.

    bytes: over those that dense attention reads in the same layers; no entry if the method does not count them.
    """
    layers = sorted({layer for each in found for layer in each["layers"]})
    sums = {layer: dict.fromkeys(("rows", *BARS), 0.0) for layer in layers}
    for each in found:
        for layer, rows, *values in zip(*(each[name] for name in ("layers", "rows", *BARS)), strict=True):
            sums[layer]["rows"] += rows
            for name, value in zip(BARS, values, strict=True):
                sums[layer][name] += rows * value
    layers = [layer for layer in layers if sums[layer]["rows"]]
    if not layers:
        return None
    means = {name: [sums[layer][name] / sums[layer]["rows"] for layer in layers] for name in BARS}
    read = [each["bytes"] for each in found]
    counted = {} if None in read else {"bytes": sum(read) / sum(each["dense_bytes"] for each in found)}
    return {"layers": layers, **means, **counted}
