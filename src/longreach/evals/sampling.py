"""Reads and sampled shares of a method with hash tables, as records of evaluations keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.runtime import Report

BYTES = ("search_bytes", "attention_bytes", "error_bar_bytes")
MEMORY = ("table_bytes", "kv_bytes")
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
        **{name: sum(each.get(name, 0) for each in notes) for name in BYTES},
        "dense_bytes": sum(r.dense_bytes for r in layers),
        "rows": notes[0]["sampled_rows"],
        **{name: [sum(each[name]) / len(each[name]) for each in notes] for name in BY_LAYER},
        **{name: sum(each[f"{name}_per_sequence"] for each in notes) for name in MEMORY},
    }


def mean_of(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Results of `sampling_of` for several prompts as one: shares of dense attention's bytes, and means by layer.

    search and attention make up all that the layers read; attention includes the estimate of error bars.
    tables_over_kv: memory of the tables over that of keys and values, of all these layers and prompts together. None
    without a prompt whose keys were in the tables.
    """
    rows = sum(each["rows"] for each in found)
    if not rows:
        return None
    search, attention, bars, dense, tables, kv = (
        sum(each[name] for each in found) for name in (*BYTES, "dense_bytes", *MEMORY)
    )
    return {
        "layers": found[0]["layers"],
        "search": search / dense,
        "attention": (attention + bars) / dense,
        **{
            name: [
                sum(each["rows"] * share for each, share in zip(found, layer, strict=True)) / rows
                for layer in zip(*(each[name] for each in found), strict=True)
            ]
            for name in BY_LAYER
        },
        "tables_over_kv": tables / kv,
    }
