"""Sums of the bytes that layers read, kept on the device, and the report made from them."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from longreach.methods.base import AttentionMethod, Configured, Notes, Outcome, PromptObserver
from longreach.methods.call import LayerCall, Phase
from longreach.ops import Selection
from longreach.runtime.counting import COLUMNS, Counting, host_bytes
from longreach.runtime.report import LayerReport, Report

Place = tuple[Phase, int, Configured | None]  # phase, layer, and who read it beside the method that attends, else None
ADDED = ("key_bytes", "value_bytes", "metadata_bytes", "overflowed_lists")  # columns that observers add to


@dataclass
class LayerTally:
    """The host's counts of one layer in one phase; rows and bytes are summed on the device."""

    method: str
    impls: set[str] = field(default_factory=set)
    steps: int = 0
    dense_reasons: dict[str, int] = field(default_factory=dict)  # reason -> rows of a prefill, or steps of a decode
    notes: Notes | None = None  # without tensors: how the sums are reported
    read: tuple[int, int, int] = (0, 0, 0)  # bytes of keys, values and metadata that the host counted


@dataclass(frozen=True)
class HostCount:
    """The host's counts of one layer of one pass, added once each time that the pass runs on the device."""

    place: Place
    method: str
    impl: str
    dense: tuple[str, int] | None = None  # reason, and rows of a prefill or steps of a decode that it applies to
    notes: Notes | None = None  # without tensors
    read: tuple[int, int, int] = (0, 0, 0)  # bytes of keys, values and metadata


class Pending(NamedTuple):
    """Layers that were counted and wait for a pass to commit them."""

    noted: list[HostCount]
    counting: Counting


class Ledger:
    """Sums reads without a device sync. A row reads its keys once per KV head and pass over them.

    `add` notes a layer. `commit` ends a pass: a few kernels add all its layers to tensors at fixed addresses. A pass
    captured in a CUDA graph counts at each replay: `commit_on_device` is captured, `commit_on_host` is called again.
    """

    def __init__(self) -> None:
        self.tallies: dict[Place, LayerTally] = {}
        self._sums: dict[tuple[Place, ...], Tensor] = {}  # layers of a pass -> COLUMNS of each
        self._coefficients: dict[Hashable, Tensor] = {}
        self._noted: list[HostCount] = []
        self._notes: list[tuple[Place, Notes]] = []
        # (columns function, layers of a pass) -> sums of notes [L, H, C]
        self._note_sums: dict[tuple[Hashable, tuple[Place, ...]], Tensor] = {}
        self._counting = Counting()

    def mask_rows(self, ended: Tensor) -> None:
        """Do not count these decoding rows of the next pass, bool [R]: they pad it, or their sequences have ended."""
        self._counting = Counting(ended)

    def add(self, phase: Phase, call: LayerCall, method: str, outcome: Outcome, dense: Selection) -> None:
        """Count one layer of one pass. dense: the selection that exact attention of the layer reads.

        Sums outlive the pass, so they are made outside inference mode, whatever the pass runs in.
        """
        place, notes = (phase, call.layer, None), outcome.notes
        with torch.inference_mode(False):
            self._counting.add(place, call.meter.noted, call, dense, masked=_masked(phase))
        how = None if notes is None else notes._replace(tensors=())
        read = host_bytes(call.meter.noted)
        self._noted.append(HostCount(place, method, _impls(call), _dense(phase, call, outcome), how, read))
        if notes is not None:
            self._notes.append((place, notes))

    def add_observer(self, phase: Phase, call: LayerCall, observer: Configured) -> None:
        """Count a method's reads while it observed a layer's rows. They are in the reports for that method; those of a
        method that fuses or evicts are in all reports."""
        place = (phase, call.layer, observer)
        if not all(isinstance(one.read.counted, int) for one in call.meter.noted):
            with torch.inference_mode(False):
                self._counting.add(place, call.meter.noted, call, None, masked=_masked(phase))
        self._noted.append(HostCount(place, observer.name, _impls(call), read=host_bytes(call.meter.noted)))

    def add_eviction(self, call: LayerCall, eviction: Configured) -> None:
        """Count what an eviction read to choose, between two passes."""
        under_way = self.put_aside()
        try:
            self.add_observer("prefill", call, eviction)
            self.commit()
        finally:
            self.resume(under_way)

    def put_aside(self) -> Pending:
        """Take what the current pass has counted out of it, for a later pass to commit (`resume`)."""
        found = Pending(self._noted, self._counting)
        self._noted, self._counting = [], Counting()
        return found

    def resume(self, pending: Pending) -> None:
        """Begin a pass with what an earlier one counted."""
        self._noted, self._counting = list(pending.noted), pending.counting

    def observed_all(self, observer: PromptObserver) -> bool:
        """Whether a method observed all passes over prompts that count."""
        steps = {place: tally.steps for place, tally in self.tallies.items() if place[0] == "prefill"}
        observed = max((n for (_, _, who), n in steps.items() if who == observer), default=0)
        return observed == max((n for (_, _, who), n in steps.items() if who is None), default=0)

    def abandon(self) -> None:
        """Drop the current pass: it failed."""
        self._noted, self._notes, self._counting = [], [], Counting()

    def commit(self) -> None:
        """End the pass and add its layers to the sums."""
        self.commit_on_host(self.commit_on_device())

    def commit_on_device(self) -> tuple[HostCount, ...]:
        """The device's part of `commit`; returns the host's, for `commit_on_host`."""
        noted, counting = self._noted, self._counting
        self._noted, self._counting = [], Counting()
        if not noted:
            return ()
        with torch.inference_mode(False):
            if counting.layers:  # else the host has counted all
                places, columns = counting.columns(self._coefficients)
                if places not in self._sums:
                    self._sums[places] = torch.zeros_like(columns)
                self._sums[places] += columns
            self._add_notes(counting.ended)
        return tuple(noted)

    def _add_notes(self, ended: Tensor | None) -> None:
        """Sum the notes of the pass, with a few kernels for all layers whose notes have equal shapes."""
        groups: dict[Hashable, list[tuple[Place, Notes]]] = {}
        for place, notes in self._notes:
            phase, _, _ = place
            shapes = (x.shape for x in notes.tensors)
            groups.setdefault((phase, notes.columns, *shapes), []).append((place, notes))
        self._notes = []
        for some in groups.values():
            stacked = [torch.stack(x) for x in zip(*(notes.tensors for _, notes in some), strict=True)]
            columns = some[0][1].columns(*stacked)
            phase, _, _ = some[0][0]
            if ended is not None and _masked(phase):
                columns = columns.masked_fill(ended[:, None, None], 0)
            found = columns.sum(1, dtype=torch.float64)
            name = some[0][1].columns, tuple(place for place, _ in some)
            if name not in self._note_sums:
                self._note_sums[name] = torch.zeros_like(found)
            self._note_sums[name] += found

    def commit_on_host(self, layers: tuple[HostCount, ...]) -> None:
        """The host's part of `commit`."""
        for n in layers:
            tally = self.tallies.get(n.place)
            if tally is None:
                tally = self.tallies[n.place] = LayerTally(n.method)
            if n.impl:  # an observer that noted rows alone ran no op
                tally.impls.add(n.impl)
            tally.steps += 1
            tally.notes = n.notes or tally.notes
            tally.read = tuple(map(sum, zip(tally.read, n.read, strict=True)))  # type: ignore[assignment]
            if n.dense is not None:
                reason, count = n.dense
                tally.dense_reasons[reason] = tally.dense_reasons.get(reason, 0) + count

    def computed_by(self, impl: str, layers: Collection[int]) -> bool:
        """Whether an implementation computed some op of one of these layers in a decode step. Needs no device."""
        return any(
            phase == "decode" and layer in layers and any(impl in used.split("+") for used in tally.impls)
            for (phase, layer, _), tally in self.tallies.items()
        )

    def reset(self) -> None:
        """Start counting from zero. A pass under way is counted whole when it commits.

        Sums are cleared in place, as captured passes continue to add to them.
        """
        self.tallies.clear()
        for sums in (*self._sums.values(), *self._note_sums.values()):
            sums.zero_()

    def report(self, observer: PromptObserver | None = None) -> Report:
        """The report of all committed passes, layer by layer. The pass under way is not in it and goes on unchanged.

        observer: the reads of this method while it observed prompts are included. Those by which tokens were chosen,
        for fusion and for eviction, always are.
        """
        totals, notes = self._totals(), self._note_totals()
        layers = []
        for place, tally in sorted(self.tallies.items(), key=lambda item: (item[0][0] != "prefill", item[0][1])):
            phase, layer, reader = place
            if reader is not None:
                continue
            read, method, impls = dict(totals[place]), tally.method, tally.impls
            for at, other in self.tallies.items():
                who, observed = at[2], totals[at]
                counts = who is not None and (who == observer or not isinstance(who, AttentionMethod))
                if at[:2] == (phase, layer) and counts and any(observed[name] for name in ADDED):
                    read |= {name: read[name] + observed[name] for name in ADDED}
                    method = method if other.method in method.split("+") else f"{method}+{other.method}"
                    impls = impls | other.impls
            note_sums = None if tally.notes is None else notes.get((tally.notes.columns, place))
            layers.append(LayerReport(
                phase=phase, layer=layer, method=method, impl=", ".join(sorted(impls)), steps=tally.steps, **read,
                dense_reasons=tuple(sorted(tally.dense_reasons)),
                dense_counts=tuple(tally.dense_reasons[reason] for reason in sorted(tally.dense_reasons)),
                notes=None if tally.notes is None or note_sums is None else
                tally.notes.summary(note_sums, read["rows"]),
            ))  # fmt: skip
        return Report(tuple(layers))

    def _totals(self) -> dict[Place, dict[str, int]]:
        """Place -> column -> sum over all passes. Waits for the device."""
        totals = {place: dict.fromkeys(COLUMNS, 0) for place in self.tallies}
        for place, tally in self.tallies.items():
            totals[place].update(zip(COLUMNS, tally.read, strict=False))  # the first columns
        for places, columns in self._sums.items():
            for place, row in zip(places, columns.tolist(), strict=True):
                if place in totals:
                    totals[place] = {name: totals[place][name] + n for name, n in zip(COLUMNS, row, strict=True)}
        return totals

    def _note_totals(self) -> dict[tuple[Hashable, Place], Tensor]:
        """(columns function, place) -> sums of notes over all passes, fp64 [H, C] on the host."""
        totals: dict[tuple[Hashable, Place], Tensor] = {}
        for (columns, places), sums in self._note_sums.items():
            for place, row in zip(places, sums.cpu(), strict=True):
                key = columns, place
                totals[key] = totals[key] + row if key in totals else row
        return totals


def _masked(phase: Phase) -> bool:
    """Whether `mask_rows` is of rows of this phase."""
    return phase == "decode"


def _dense(phase: Phase, call: LayerCall, outcome: Outcome) -> tuple[str, int] | None:
    """Why a layer attended densely, and in how many rows of a prefill, or steps of a decode."""
    if outcome.dense_reason:
        return outcome.dense_reason, call.rows.pos.shape[0] if phase == "prefill" else 1
    return outcome.partly_dense


def _impls(call: LayerCall) -> str:
    return "+".join(sorted(call.meter.kernels_used))
