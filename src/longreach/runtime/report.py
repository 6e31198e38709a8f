"""Reports of a session's reads by layer, compared with the bytes that dense attention reads."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from longreach.cache import MemoryUse
from longreach.methods.call import Phase

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class LayerReport:
    """One layer in one phase: bytes of keys, values and metadata read, and the bytes that dense attention reads.

    rows: rows counted; longreach's decode loop leaves out the rows of sequences that have ended. dense_reasons: why the
    method attended densely, if it did; dense_counts: how many rows of a prefill, or steps of a decode, each reason
    applies to. notes: diagnostics of the method, else None; "note" among them is a summary.
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
    dense_counts: tuple[int, ...] = ()

    @property
    def dense_notes(self) -> tuple[str, ...]:
        """For each reason one text, which names the rows or steps if the reason does not apply to all."""
        total, unit = (self.rows, "rows") if self.phase == "prefill" else (self.steps, "steps")
        counts = self.dense_counts or (total,) * len(self.dense_reasons)
        return tuple(
            f"dense: {reason}" if count >= total else f"dense for {count} of {total} {unit}: {reason}"
            for reason, count in zip(self.dense_reasons, counts, strict=True)
        )

    @property
    def bytes_read(self) -> int:
        return self.key_bytes + self.value_bytes + self.metadata_bytes

    @property
    def fraction(self) -> float:
        """Bytes read over dense attention's bytes."""
        return self.bytes_read / self.dense_bytes if self.dense_bytes else 0.0


@dataclass(frozen=True)
class PlanReport:
    """A plan that a session found or made for methods without one.

    source: "cache", a plan kept from before; "prompt", made of this session's prompt; None: there is none yet. about:
    the plan, or why there is none. tokens: of the prompt; seconds: to make the plan, beside the prefill. file: where it
    is kept. not_kept: why it is kept for this session only. ignored: files in the cache folder that do not fit.
    hash_seconds: to hash the weights, by which kept plans are found: once a session, for its first plan.
    """

    kind: str
    source: Literal["cache", "prompt"] | None
    about: str
    tokens: int | None = None
    seconds: float | None = None
    file: str | None = None
    not_kept: str | None = None
    ignored: tuple[str, ...] = ()
    hash_seconds: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        if self.source is None:
            text = self.about
        elif self.source == "cache":
            text = f"{self.kind} plan of an earlier session: {self.about}"
        else:
            text = f"{self.kind} plan made of {self.tokens} tokens in {self.seconds:.2f} s: {self.about}"
        kept = [f"kept in {self.file}"] * (self.file is not None)
        kept += [f"for this session only: {self.not_kept}"] * (self.not_kept is not None)
        hashed = [] if self.hash_seconds is None else [f"hashing the weights took {self.hash_seconds:.2f} s"]
        return "; ".join((text, *kept, *(f"not used: {one}" for one in self.ignored), *hashed))


@dataclass(frozen=True)
class Report:
    """A session's reads by layer. `print(report)` shows a table; `to_json` returns the numbers.

    memory: where keys and values of the last pass over a cache with `CacheConfig(host=True)` lie; None without one.
    plans: those that the session found or made itself. plain_reason: why transformers' own loop made the last answer of
    model.generate, where captured steps were allowed; else None.
    """

    layers: tuple[LayerReport, ...]
    memory: MemoryUse | None = None
    plans: tuple[PlanReport, ...] = ()
    plain_reason: str | None = None

    def computed_by(self, impl: str, layers: Collection[int]) -> tuple[int, ...]:
        """Of these layers, those of which an implementation computed some op in a decode step."""
        named = {r.layer for r in self.layers if r.phase == "decode" and impl in re.split(r"\+|, ", r.impl)}
        return tuple(sorted(named.intersection(layers)))

    def fraction(self, phase: Phase | None = None) -> float | None:
        """Bytes read over dense attention's bytes, all layers; None before any step of the phase."""
        some = [r for r in self.layers if phase is None or r.phase == phase]
        dense = sum(r.dense_bytes for r in some)
        return sum(r.bytes_read for r in some) / dense if dense else None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                **r.__dict__,
                "bytes_read": r.bytes_read,
                "fraction": r.fraction,
                "dense_reasons": list(r.dense_reasons),
                "dense_counts": list(r.dense_counts),
            }
            for r in self.layers
        ]
        for row in rows:
            if row["notes"] is None:
                del row["notes"]
        memory = {} if self.memory is None else {"memory": self.memory.to_json()}
        plans = {"plans": [asdict(plan) for plan in self.plans]} if self.plans else {}
        plain = {} if self.plain_reason is None else {"plain_reason": self.plain_reason}
        shares: dict[str, Any] = {phase: self.fraction(phase) for phase in PHASES}
        return {**shares, **memory, **plans, **plain, "layers": rows}

    def __str__(self) -> str:
        shares = "".join(f"{name:>9}" for name in ("K", "V", "meta"))
        head = f"{'phase':8}{'layer':>6}  {'method':16}{'impl':17}{'rows':>9}{shares}{'of dense':>10}  note"
        lines = [head]
        for r in self.layers:
            d = max(r.dense_bytes, 1)
            shares = "".join(f"{x / d:>9.1%}" for x in (r.key_bytes, r.value_bytes, r.metadata_bytes))
            says = [r.notes["note"]] if r.notes and "note" in r.notes else []
            note = "; ".join((*r.dense_notes, *says))
            if r.overflowed_lists:
                note = f"{note}; {r.overflowed_lists} lists overflowed and read densely".lstrip("; ")
            lines.append(
                f"{r.phase:8}{r.layer:>6}  {r.method:16}{r.impl:17}{r.rows:>9}{shares}"
                f"{r.fraction:>10.1%}  {note}".rstrip()
            )
        for phase in PHASES:
            total = self.fraction(phase)
            if total is not None:
                lines.append(f"{phase}: {total:.1%} of the bytes that dense attention reads")
        if self.memory is not None:
            lines.append(str(self.memory))
        lines += map(str, self.plans)
        if self.plain_reason is not None:
            lines.append(f"model.generate: steps were not captured: {self.plain_reason}")
        return "\n".join(lines)
