"""Bytes read, as tables and JSON show them."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.methods.base import Phase
from longreach.methods.ledger import Report


@dataclass(frozen=True)
class Reads:
    """What a phase read, each over the bytes that dense attention reads (its keys are half of them)."""

    total: float
    keys: float
    values: float
    metadata: float

    @classmethod
    def of(cls, report: Report, phase: Phase) -> Reads | None:
        """The shares of all layers together; None where the phase had no step."""
        layers = [layer for layer in report.layers if layer.phase == phase]
        dense = sum(layer.dense_bytes for layer in layers)
        if not dense:
            return None
        keys = sum(layer.key_bytes for layer in layers)
        values = sum(layer.value_bytes for layer in layers)
        metadata = sum(layer.metadata_bytes for layer in layers)
        return cls((keys + values + metadata) / dense, keys / dense, values / dense, metadata / dense)
