"""What a method that samples keys read, and which share of them it sampled, as records of evaluations keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.runtime import Report

BYTES = ("search_bytes", "attention_bytes", "dense_bytes")
BY_LAYER = ("sampled_head", "sampled_group", "overflowed")


def sampling_of(report: Report) -> dict[str, Any] | None:
    """Of the layers that sample in decode steps: bytes, and means over KV heads by layer; None without such a layer.

    dense_bytes: those that dense attention reads in these layers. table_share: memory of the tables over that of keys
    and values, the largest of a layer.
    """
    layers = [r for r in report.layers if r.phase == "decode" and r.notes and "search_bytes" in r.notes]
    if not layers:
        return None
    notes = [r.notes for r in layers if r.notes]
    return {
        "layers": [r.layer for r in layers],
        "search_bytes": sum(each["search_bytes"] for each in notes),
        "attention_bytes": sum(each["attention_bytes"] for each in notes),
        "dense_bytes": sum(r.dense_bytes for r in layers),
        **{name: [_mean(each[name]) for each in notes] for name in BY_LAYER},
        "table_share": max(each["table_share"] for each in notes),
    }


def mean_of(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Results of `sampling_of` for several prompts as one: shares of dense attention's bytes, and means by layer."""
    if not found:
        return None
    search, attention, dense = (sum(each[name] for each in found) for name in BYTES)
    return {
        "layers": found[0]["layers"],
        "search": search / dense,
        "attention": attention / dense,
        **{name: [_mean(layer) for layer in zip(*(each[name] for each in found), strict=True)] for name in BY_LAYER},
        "table_share": max(each["table_share"] for each in found),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
