"""Reports of a session's reads by layer, compared with the bytes that dense attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longreach.cache import MemoryUse
from longreach.methods.call import Phase


@dataclass(frozen=True)
class LayerReport:
    """One layer in one phase: bytes of keys, values and metadata read, and the bytes that dense attention reads.

    rows: rows counted; longreach's decode loop leaves out the rows of sequences that have ended. dense_reasons: why the
    method attended densely, if it did. notes: diagnostics of the method, else None; "note" among them is a summary.
    """

    phase: Phase
    layer: int
    method: str
    impl: str
    steps: int
    rows: int
    key_bytes: int
    value_bytes: int
    metadata_bytes: int
    dense_bytes: int
    overflowed_lists: int
    dense_reasons: tuple[str, ...]
    notes: dict[str, Any] | None = None

    @property
    def bytes_read(self) -> int:
        return self.key_bytes + self.value_bytes + self.metadata_bytes

    @property
    def fraction(self) -> float:
        """Bytes read over dense attention's bytes."""
        return self.bytes_read / self.dense_bytes if self.dense_bytes else 0.0


@dataclass(frozen=True)
class Report:
    """A session's reads by layer. `print(report)` shows a table; `to_json` returns the numbers.

    memory: where keys and values of the last pass over a cache with `CacheConfig(host=True)` lie; None without one.
    """

    layers: tuple[LayerReport, ...]
    memory: MemoryUse | None = None

    def fraction(self, phase: Phase | None = None) -> float | None:
        """Bytes read over dense attention's bytes, all layers; None before any step of the phase."""
        some = [r for r in self.layers if phase is None or r.phase == phase]
        dense = sum(r.dense_bytes for r in some)
        return sum(r.bytes_read for r in some) / dense if dense else None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {**r.__dict__, "bytes_read": r.bytes_read, "fraction": r.fraction, "dense_reasons": list(r.dense_reasons)}
            for r in self.layers
        ]
        for row in rows:
            if row["notes"] is None:
                del row["notes"]
        memory = {} if self.memory is None else {"memory": self.memory.to_json()}
        return {"prefill": self.fraction("prefill"), "decode": self.fraction("decode"), **memory, "layers": rows}

    def __str__(self) -> str:
        shares = "".join(f"{name:>9}" for name in ("K", "V", "meta"))
        head = f"{'phase':8}{'layer':>6}  {'method':16}{'impl':17}{'rows':>9}{shares}{'of dense':>10}  note"
        lines = [head]
        for r in self.layers:
            d = max(r.dense_bytes, 1)
            shares = "".join(f"{x / d:>9.1%}" for x in (r.key_bytes, r.value_bytes, r.metadata_bytes))
            says = [r.notes["note"]] if r.notes and "note" in r.notes else []
            note = "; ".join((*(f"dense: {why}" for why in r.dense_reasons), *says))
            if r.overflowed_lists:
                note = f"{note}; {r.overflowed_lists} lists overflowed and read densely".lstrip("; ")
            lines.append(
                f"{r.phase:8}{r.layer:>6}  {r.method:16}{r.impl:17}{r.rows:>9}{shares}"
                f"{r.fraction:>10.1%}  {note}".rstrip()
            )
        for phase in ("prefill", "decode"):
            total = self.fraction(phase)
            if total is not None:
                lines.append(f"{phase}: {total:.1%} of the bytes that dense attention reads")
        if self.memory is not None:
            lines.append(str(self.memory))
        return "\n".join(lines)
