"""Bytes of a decode step over a cache with keys and values in host memory, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean
from typing import Any

from longreach.adapters.transformers import LongreachCache
from longreach.methods.base import AttentionMethod
from longreach.methods.magicpig import MagicPIG
from longreach.runtime import LayerReport, Report

HOW = (
    "Bytes are means over the steps of a measurement, of all sequences, without the weights. MagicPIG's kernels read a "
    "sampled key once, for its weight and for attention; reports of a session count it twice, these numbers once. "
    "Where the CPU attends, it reads the bytes that are called those of the link; queries and lists cross the link."
)


def step_bytes(
    report: Report, method: AttentionMethod, host_layers: Collection[int], seconds: float
) -> dict[str, Any]:  # fmt: skip
    """An entry's fields on what a step reads.

    attention_bytes: keys, values and metadata. link_bytes: of keys and values of layers in host memory. link_share:
    their share. link_gb_per_s: link_bytes over the time of a whole step. percent_of_dense: attention_bytes over dense
    attention's.
    """
    layers = [layer for layer in report.layers if layer.phase == "decode"]
    keys = {layer.layer: _key_bytes(layer, method) / layer.steps for layer in layers}
    other = {layer.layer: layer.metadata_bytes / layer.steps for layer in layers}
    link = sum(amount for layer, amount in keys.items() if layer in host_layers)
    total = sum(keys.values()) + sum(other.values())
    return {
        "attention_bytes": round(total),
        "link_bytes": round(link),
        "link_share": link / total,
        "link_gb_per_s": link / seconds / 1e9,
        "percent_of_dense": 100 * total / sum(layer.dense_bytes / layer.steps for layer in layers),
    }


def _key_bytes(layer: LayerReport, method: AttentionMethod) -> int:
    """Bytes of keys and values that left memory, all steps."""
    if isinstance(method, MagicPIG) and layer.notes:
        return 2 * layer.value_bytes
    return layer.key_bytes + layer.value_bytes


def sampled_shares(report: Report) -> dict[str, Any]:
    """MagicPIG's mean share of the context that a query head sampled, and its KV head; {} for other methods."""
    notes = [layer.notes for layer in report.layers if layer.notes and "sampled_head" in layer.notes]
    if not notes:
        return {}
    return {"sampled": {name: fmean(fmean(note[name]) for note in notes) for name in ("sampled_head", "sampled_group")}}


def memory_of(cache: LongreachCache, model: Any) -> dict[str, Any]:
    """Bytes allocated, by kind: keys and values in host memory and in the GPU's, the staging of prompts, the method's
    state, all weights; and the number of layers in either memory."""
    use = cache.kv.memory_use
    return {
        "host_kv": use.host_bytes,
        "device_kv": use.device_bytes,
        "staging": use.staging_bytes,
        "state": cache.states.nbytes,
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "host_layers": len(use.host_layers),
        "device_layers": len(use.device_layers),
    }
