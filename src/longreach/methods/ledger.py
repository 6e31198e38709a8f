"""What was read, counted on the device per layer and phase, and the report made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longreach.methods.base import LayerCall, Outcome, Phase
from longreach.ops import KVView, Lists, PackedLists, Rows, Selection

COLUMNS = ("key_bytes", "value_bytes", "metadata_bytes", "dense_bytes", "overflowed_lists")


@dataclass
class LayerTally:
    """Sums over the steps of one layer in one phase: COLUMNS on the device, the rest known on the host."""

    method: str
    impl: str
    sums: Tensor
    steps: int = 0
    rows: int = 0
    dense_because: set[str] = field(default_factory=set)


class Ledger:
    """Adds up reads without a device sync. A row streams its keys once per KV head and pass."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[Phase, int], LayerTally] = {}

    def add(
        self, phase: Phase, call: LayerCall, method: str, impl: str, outcome: Outcome, dense_reads: Selection
    ) -> None:
        """Count one layer of one pass; `dense_reads` is what exact attention of this layer reads.

        Sums outlive the pass, so they are made outside inference mode, whatever the pass runs in.
        """
        with torch.inference_mode(False):
            self._add(phase, call, method, impl, outcome, dense_reads)

    def _add(
        self, phase: Phase, call: LayerCall, method: str, impl: str, outcome: Outcome, dense_reads: Selection
    ) -> None:
        tally = self.tallies.get((phase, call.layer))
        if tally is None:
            zeros = torch.zeros(len(COLUMNS), dtype=torch.int64, device=call.rows.q.device)
            tally = self.tallies[phase, call.layer] = LayerTally(method, impl, zeros)
        vector = call.kv.k.shape[3] * call.kv.k.element_size()
        keys, values, metadata = outcome.reads

        def total(selections: tuple[Any, ...]) -> Tensor:
            counts = [s.reads(call.rows, call.kv).sum() for s in selections]
            return torch.stack(counts).sum() * vector if counts else torch.zeros_like(tally.sums[0])

        dense = total((dense_reads,)) * 2
        # an int is filled in on the device: copying it there would be a sync
        extra = torch.full_like(dense, metadata) if isinstance(metadata, int) else metadata.sum()
        for s in (*keys, *(v for v in values if not any(v is k for k in keys))):
            if isinstance(s, (Lists, PackedLists)):
                extra = extra + list_bytes(s, call.rows, call.kv).sum()
        lists = {id(s): s for s in (*keys, *values) if isinstance(s, Lists)}
        over = sum((s.overflowed.sum() for s in lists.values()), torch.zeros_like(dense))
        tally.sums += torch.stack([total(keys), total(values), extra, dense, over])
        tally.steps += 1
        tally.rows += call.rows.pos.shape[0]
        if outcome.dense_because:
            tally.dense_because.add(outcome.dense_because)

    def report(self) -> Report:
        layers = [
            LayerReport(
                phase=phase,
                layer=layer,
                method=t.method,
                impl=t.impl,
                steps=t.steps,
                rows=t.rows,
                **dict(zip(COLUMNS, t.sums.tolist(), strict=True)),
                dense_because=tuple(sorted(t.dense_because)),
            )
            for (phase, layer), t in sorted(self.tallies.items(), key=lambda kv: (kv[0][0] != "prefill", kv[0][1]))
        ]
        return Report(tuple(layers))


def list_bytes(lists: Lists | PackedLists, rows: Rows, kv: KVView) -> Tensor:
    """Bytes of list entries in use, log-weights included, that one pass reads for each row: int64 [R]."""
    entry = lists.index.element_size()
    if lists.log_weight is not None:
        entry += lists.log_weight.element_size()
    if isinstance(lists, Lists):
        used = lists.count.long().masked_fill(lists.overflowed, 0)  # an overflowed list is not read, its row is dense
    else:
        used = lists.offsets.long().diff().unflatten(0, (-1, lists.heads))
    streams = kv.heads if used.shape[1] == 1 else 1  # every KV head reads the list that serves them all
    used = used.sum(1) * streams * entry
    return used if lists.list_of is None else used[lists.list_of.long()]


@dataclass(frozen=True)
class LayerReport:
    """One layer in one phase. Bytes are of keys, values and metadata read, beside what dense attention reads."""

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
    dense_because: tuple[str, ...]

    @property
    def bytes_read(self) -> int:
        return self.key_bytes + self.value_bytes + self.metadata_bytes

    @property
    def fraction(self) -> float:
        """Bytes read over dense attention's bytes."""
        return self.bytes_read / self.dense_bytes if self.dense_bytes else 0.0


@dataclass(frozen=True)
class Report:
    """What a session read, layer by layer. `print(report)` shows a table; `to_json` gives the numbers."""

    layers: tuple[LayerReport, ...]

    def fraction(self, phase: Phase | None = None) -> float | None:
        """Bytes read over dense attention's bytes, all layers; None before any step of the phase."""
        some = [r for r in self.layers if phase is None or r.phase == phase]
        dense = sum(r.dense_bytes for r in some)
        return sum(r.bytes_read for r in some) / dense if dense else None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {**r.__dict__, "bytes_read": r.bytes_read, "fraction": r.fraction, "dense_because": list(r.dense_because)}
            for r in self.layers
        ]
        return {"prefill": self.fraction("prefill"), "decode": self.fraction("decode"), "layers": rows}

    def __str__(self) -> str:
        shares = "".join(f"{name:>9}" for name in ("K", "V", "meta"))
        head = f"{'phase':8}{'layer':>6}  {'method':14}{'impl':11}{'rows':>9}{shares}{'of dense':>10}  note"
        lines = [head]
        for r in self.layers:
            d = max(r.dense_bytes, 1)
            shares = "".join(f"{x / d:>9.1%}" for x in (r.key_bytes, r.value_bytes, r.metadata_bytes))
            note = "; ".join((*(f"dense: {why}" for why in r.dense_because),))
            if r.overflowed_lists:
                note = f"{note}; {r.overflowed_lists} lists overflowed and read densely".lstrip("; ")
            lines.append(
                f"{r.phase:8}{r.layer:>6}  {r.method:14}{r.impl:11}{r.rows:>9}{shares}"
                f"{r.fraction:>10.1%}  {note}".rstrip()
            )
        for phase in ("prefill", "decode"):
            total = self.fraction(phase)
            if total is not None:
                lines.append(f"{phase}: {total:.1%} of the bytes that dense attention reads")
        return "\n".join(lines)
