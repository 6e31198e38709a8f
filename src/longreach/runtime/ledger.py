"""Sums of the bytes that layers read, kept on the device, and the report made from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longreach.methods.base import Notes, Outcome, PromptObserver
from longreach.methods.call import LayerCall, Phase
from longreach.ops import Selection
from longreach.runtime.counting import COLUMNS, Counting
from longreach.runtime.report import LayerReport, Report

Place = tuple[Phase, int, PromptObserver | None]  # phase, layer, and the observer that read it, else None
ADDED = ("key_bytes", "value_bytes", "metadata_bytes", "overflowed_lists")  # columns that observers add to


@dataclass
class LayerTally:
    """The host's counts of one layer in one phase; rows and bytes are summed on the device."""

    method: str
    impls: set[str] = field(default_factory=set)
    steps: int = 0
    dense_reasons: set[str] = field(default_factory=set)
    notes: Notes | None = None  # without tensors: how the sums are reported


@dataclass(frozen=True)
class HostCount:
    """The host's part of one layer of one pass. It counts once for every time that the pass runs on the device."""

    place: Place
    method: str
    impl: str
    dense_reason: str | None = None
    notes: Notes | None = None  # without tensors


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
        """Do not count these rows of the next pass, bool [R]: their sequences have ended."""
        self._counting = Counting(ended)

    def add(self, phase: Phase, call: LayerCall, method: str, outcome: Outcome, dense: Selection) -> None:
        """Count one layer of one pass. dense: the selection that exact attention of the layer reads.

        Sums outlive the pass, so they are made outside inference mode, whatever the pass runs in.
        """
        place, notes = (phase, call.layer, None), outcome.notes
        with torch.inference_mode(False):
            self._counting.add(place, call.meter.noted, call, dense)
        how = None if notes is None else notes._replace(tensors=())
        self._noted.append(HostCount(place, method, _impls(call), outcome.dense_reason, how))
        if notes is not None:
            self._notes.append((place, notes))

    def add_observer(self, phase: Phase, call: LayerCall, observer: PromptObserver) -> None:
        """Count a method's reads while it observed a layer's rows. They are in the reports for that method."""
        place = (phase, call.layer, observer)
        if call.meter.noted:
            with torch.inference_mode(False):
                self._counting.add(place, call.meter.noted, call, None)
        self._noted.append(HostCount(place, observer.name, _impls(call)))

    def observed_all(self, observer: PromptObserver) -> bool:
        """Whether a method observed all passes over prompts that count."""
        steps = {place: tally.steps for place, tally in self.tallies.items() if place[0] == "prefill"}
        observed = max((n for (_, _, who), n in steps.items() if who == observer), default=0)
        return observed == max((n for (_, _, who), n in steps.items() if who is None), default=0)

    def abandon(self) -> None:
        """Drop the current pass: it failed."""
        self._noted, self._notes, self._counting = [], [], Counting()

    def commit(self) -> None:
        """End the pass: its layers count."""
        self.commit_on_host(self.commit_on_device())

    def commit_on_device(self) -> tuple[HostCount, ...]:
        """The device's part of `commit`; returns the host's, for `commit_on_host`."""
        noted, counting = self._noted, self._counting
        self._noted, self._counting = [], Counting()
        if not noted:
            return ()
        with torch.inference_mode(False):
            places, columns = counting.columns(self._coefficients)
            if places not in self._sums:
                self._sums[places] = torch.zeros_like(columns)
            self._sums[places] += columns
            self._add_notes(counting.ended)
        return tuple(noted)

    def _add_notes(self, ended: Tensor | None) -> None:
        """Sum the notes of the pass, with a few kernels for all layers whose notes have equal shapes."""
        alike: dict[Hashable, list[tuple[Place, Notes]]] = {}
        for place, notes in self._notes:
            name = (notes.columns, *(x.shape for x in notes.tensors))
            alike.setdefault(name, []).append((place, notes))
        self._notes = []
        for some in alike.values():
            stacked = [torch.stack(x) for x in zip(*(notes.tensors for _, notes in some), strict=True)]
            columns = some[0][1].columns(*stacked)
            if ended is not None:
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
            tally.impls.add(n.impl)
            tally.steps += 1
            tally.notes = n.notes or tally.notes
            if n.dense_reason:
                tally.dense_reasons.add(n.dense_reason)

    def reset(self) -> None:
        """Start counting from zero. A pass under way is counted whole when it commits.

        Sums are cleared in place, as captured passes continue to add to them.
        """
        self.tallies.clear()
        for sums in (*self._sums.values(), *self._note_sums.values()):
            sums.zero_()

    def report(self, observer: PromptObserver | None = None) -> Report:
        """The report of all committed passes, layer by layer. The pass under way is not in it and goes on unchanged.

        observer: the reads of this method while it observed prompts are included, else of none.
        """
        sums = {place: [0] * len(COLUMNS) for place in self.tallies}
        for places, columns in self._sums.items():
            for place, more in zip(places, columns.tolist(), strict=True):
                if place in sums:
                    sums[place] = [a + b for a, b in zip(sums[place], more, strict=True)]
        noted: dict[tuple[Hashable, Place], Tensor] = {}
        for (made, layers_of), found in self._note_sums.items():
            for place, row in zip(layers_of, found.cpu(), strict=True):
                noted[made, place] = noted[made, place] + row if (made, place) in noted else row
        layers = []
        for place, t in sorted(self.tallies.items(), key=lambda kv: (kv[0][0] != "prefill", kv[0][1])):
            phase, layer, who = place
            if who is not None:
                continue
            read, method, impls = dict(zip(COLUMNS, sums[place], strict=True)), t.method, t.impls
            extra = dict(zip(COLUMNS, sums.get((phase, layer, observer), ()), strict=False)) if observer else {}
            if any(extra.get(name) for name in ADDED):
                more = self.tallies[phase, layer, observer]
                read |= {name: read[name] + extra[name] for name in ADDED}
                method, impls = f"{method}+{more.method}", impls | more.impls
            found_notes = None if t.notes is None else noted.get((t.notes.columns, place))
            layers.append(LayerReport(
                phase=phase, layer=layer, method=method, impl=", ".join(sorted(impls)), steps=t.steps, **read,
                dense_reasons=tuple(sorted(t.dense_reasons)),
                notes=None if t.notes is None or found_notes is None else t.notes.summary(found_notes, read["rows"]),
            ))  # fmt: skip
        return Report(tuple(layers))


def _impls(call: LayerCall) -> str:
    return "+".join(sorted(call.meter.kernels_used))
