"""Bytes read, as tables and JSON show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from longreach.methods.call import Phase
from longreach.runtime import Report


@dataclass(frozen=True)
class ReadShares:
    """A phase's reads, each over the bytes that dense attention reads (its keys are half of them)."""

    total: float
    keys: float
    values: float
    metadata: float

    @classmethod
    def of(cls, report: Report, phase: Phase) -> ReadShares | None:
        """The shares of all layers together; None where the phase had no step."""
        return cls.over(phase_bytes(report, phase))

    @classmethod
    def over(cls, read: Sequence[int] | None) -> ReadShares | None:
        """The shares of a result of `phase_bytes`, or of sums of such results."""
        if not read or not read[-1]:
            return None
        keys, values, metadata, dense = read
        return cls((keys + values + metadata) / dense, keys / dense, values / dense, metadata / dense)


def kernels_used(report: Report, phase: Phase) -> list[str]:
    """The implementations of attend that computed a phase."""
    return sorted({layer.impl for layer in report.layers if layer.phase == phase})


def phase_bytes(report: Report, phase: Phase) -> list[int] | None:
    """Bytes of keys, values and metadata a phase read, and those that dense attention reads; None without a step."""
    layers = [layer for layer in report.layers if layer.phase == phase]
    columns = ("key_bytes", "value_bytes", "metadata_bytes", "dense_bytes")
    found = [sum(getattr(layer, c) for layer in layers) for c in columns]
    return found if found[-1] else None


def shares(read: Sequence[Sequence[int] | None]) -> dict[str, float] | None:
    """`Reads` as in a record, from repeated results of `phase_bytes`; None if no phase had a step."""
    total = ReadShares.over([sum(column) for column in zip(*(r for r in read if r), strict=True)])
    return None if total is None else asdict(total)
