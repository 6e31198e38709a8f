"""What was read, counted on the device per layer and phase, and the report made of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.methods.base import AttentionMethod, LayerCall, Notes, Outcome, Phase, Reads
from longreach.ops import KVView, Lists, PackedLists, Rows, Selection, Span, Spans, at
from longreach.ops.selection import slots_seen

COLUMNS = ("key_bytes", "value_bytes", "metadata_bytes", "dense_bytes", "overflowed_lists", "rows")
NOTHING = Spans((Span(at(0), at(0)),))


@dataclass
class LayerTally:
    """One layer in one phase, as far as the host knows; rows and bytes are summed on the device."""

    method: str
    impls: set[str] = field(default_factory=set)
    steps: int = 0
    dense_because: set[str] = field(default_factory=set)
    notes: Notes | None = None  # how the last ones that were noted are summed and told


@dataclass(frozen=True)
class Counted:
    """One layer of one pass, for the host: it counts once for every time that the pass runs on the device."""

    place: Place
    method: str
    impl: str
    dense_because: str | None = None
    notes: Notes | None = None  # without their tensors


Place = tuple[Phase, int, AttentionMethod | None]  # the layer, and who followed its rows and read this, or None
ADDED = ("key_bytes", "value_bytes", "metadata_bytes", "overflowed_lists")  # what followers add to


class Ledger:
    """Adds up reads without a device sync. A row streams its keys once per KV head and pass.

    `add` notes a layer, `flush` ends a pass: then all layers are added with one op, to a tensor that stays where it is,
    so that a pass captured in a CUDA graph counts whenever it is replayed (`settle` once, `count` at each replay).
    """

    def __init__(self) -> None:
        self.tallies: dict[Place, LayerTally] = {}
        self._sums: dict[tuple[Place, ...], Tensor] = {}  # layers of a pass -> COLUMNS of each
        self._noted: list[tuple[Counted, Tensor | _Streams | None]] = []  # None: nothing was read
        self._notes: list[tuple[Place, Notes]] = []
        # what makes columns, layers of a pass -> sums of what was noted [L, H, C]
        self._note_sums: dict[tuple[Hashable, tuple[Place, ...]], Tensor] = {}
        self._pass = _Pass()

    def leave_out(self, ended: Tensor) -> None:
        """Of the pass that begins, these rows (bool [R]) do not count: they belong to sequences that have ended."""
        self._pass = _Pass(ended)

    def add(
        self, phase: Phase, call: LayerCall, method: str, impl: str, outcome: Outcome, dense_reads: Selection
    ) -> None:
        """Count one layer of one pass that `impl` computed; `dense_reads` is what exact attention of it reads.

        Sums outlive the pass, so they are made outside inference mode, whatever the pass runs in.
        """
        with torch.inference_mode(False):
            columns = self._pass.columns(call, outcome.reads, dense_reads, outcome.streams)
        notes, place = outcome.notes, (phase, call.layer, None)
        how = None if notes is None else notes._replace(tensors=())
        self._noted.append((Counted(place, method, impl, outcome.dense_because, how), columns))
        if notes is not None:
            self._notes.append((place, notes))

    def beside(
        self, phase: Phase, call: LayerCall, follower: AttentionMethod, impl: str, passes: tuple[Selection, ...]
    ) -> None:
        """Count what a method read beside those who attend for the rows, to follow them; each of `passes` is one over
        keys and values that `impl` computed. It is in the reports for that method."""
        with torch.inference_mode(False):
            columns = self._pass.columns(call, Reads(passes, passes), NOTHING) if passes else None
        self._noted.append((Counted((phase, call.layer, follower), follower.name, impl), columns))

    def saw_all(self, follower: AttentionMethod) -> bool:
        """Whether a method followed in all passes over prompts that count."""
        steps = {place: tally.steps for place, tally in self.tallies.items() if place[0] == "prefill"}
        followed = max((n for (_, _, who), n in steps.items() if who == follower), default=0)
        return followed == max((n for (_, _, who), n in steps.items() if who is None), default=0)

    def abandon(self) -> None:
        """The pass failed: what was added does not count."""
        self._noted, self._notes, self._pass = [], [], _Pass()

    def flush(self) -> None:
        """The pass is over: what was added counts."""
        self.count(self.settle())

    def settle(self) -> tuple[Counted, ...]:
        """The device's part of `flush`; returns what the host is to `count`."""
        noted, ended = self._noted, self._pass.ended
        self._noted, self._pass = [], _Pass()
        if not noted:
            return ()
        layers, found = tuple(n.place for n, c in noted if c is not None), [c for _, c in noted if c is not None]
        with torch.inference_mode(False):
            columns = _columns(found, ended)
            if layers not in self._sums:
                self._sums[layers] = torch.zeros_like(columns, dtype=torch.int64)
            self._sums[layers] += columns
            self._settle_notes(ended)
        return tuple(n for n, _ in noted)

    def _settle_notes(self, ended: Tensor | None) -> None:
        """Add up what the pass noted: a few ops for all layers whose notes are alike."""
        alike: dict[Hashable, list[tuple[Place, Notes]]] = {}
        for place, notes in self._notes:
            name = (notes.columns, *(x.shape for x in notes.tensors))
            alike.setdefault(name, []).append((place, notes))
        self._notes = []
        for some in alike.values():
            stacked = [torch.stack(x) for x in zip(*(notes.tensors for _, notes in some), strict=True)]
            found = _counting(some[0][1].columns(*stacked), ended, 1).sum(1, dtype=torch.float64)
            name = some[0][1].columns, tuple(place for place, _ in some)
            if name not in self._note_sums:
                self._note_sums[name] = torch.zeros_like(found)
            self._note_sums[name] += found

    def count(self, layers: tuple[Counted, ...]) -> None:
        """The host's part of `flush`."""
        for n in layers:
            tally = self.tallies.get(n.place)
            if tally is None:
                tally = self.tallies[n.place] = LayerTally(n.method)
            tally.impls.add(n.impl)
            tally.steps += 1
            tally.notes = n.notes or tally.notes
            if n.dense_because:
                tally.dense_because.add(n.dense_because)

    def reset(self) -> None:
        """Start counting anew. Sums are cleared where they are: captured passes go on adding to them."""
        self.tallies.clear()
        self.abandon()
        for sums in (*self._sums.values(), *self._note_sums.values()):
            sums.zero_()

    def report(self, follower: AttentionMethod | None = None) -> Report:
        """Layer by layer, with what `follower` read beside; what other followers read is not in it."""
        self.flush()
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
            beside = dict(zip(COLUMNS, sums.get((phase, layer, follower), ()), strict=False)) if follower else {}
            if any(beside.get(name) for name in ADDED):
                more = self.tallies[phase, layer, follower]
                read |= {name: read[name] + beside[name] for name in ADDED}
                method, impls = f"{method}+{more.method}", impls | more.impls
            said = None if t.notes is None else noted.get((t.notes.columns, place))
            layers.append(LayerReport(
                phase=phase, layer=layer, method=method, impl=", ".join(sorted(impls)), steps=t.steps, **read,
                dense_because=tuple(sorted(t.dense_because)),
                notes=None if t.notes is None or said is None else t.notes.summary(said, read["rows"]),
            ))  # fmt: skip
        return Report(tuple(layers))


class _Pass:
    """What the layers of one pass read: spans that several layers share are counted once.

    ended: bool [R], the rows that do not count; None where all do.
    """

    def __init__(self, ended: Tensor | None = None) -> None:
        self.ended = ended
        self._known: dict[Hashable, Tensor] = {}
        self._kept: list[Any] = []  # what is known by its id must not be freed before the pass is over

    def columns(
        self, call: LayerCall, reads: Reads, dense: Selection, streams: Tensor | None = None
    ) -> Tensor | _Streams:
        """COLUMNS of one layer: int64 [6] on the device, or what they are made of."""
        keys, values, metadata = reads
        vector = call.kv.k.shape[3] * call.kv.k.element_size()
        if streams is not None:
            return _Streams(streams, self._reads(call, dense), self._rows(call), vector)
        names = [[self._name(s) for s in some] for some in (keys, values, (dense,))]
        if not isinstance(metadata, int) or any(n is None for some in names for n in some):
            return self._count(call, reads, dense, vector)
        name = (self._where(call), vector, metadata, *map(tuple, names))
        if name not in self._known:
            self._known[name] = self._count(call, reads, dense, vector)
        return self._known[name]

    def _count(self, call: LayerCall, reads: Reads, dense_reads: Selection, vector: int) -> Tensor:
        keys, values, metadata = reads
        counted: dict[int, Tensor] = {}

        def total(selections: tuple[Any, ...]) -> Tensor:
            for s in selections:
                if id(s) not in counted:
                    counted[id(s)] = self._reads(call, s)
            return _sum([counted[id(s)] for s in selections], dense) * vector

        dense = self._reads(call, dense_reads) * (vector * 2)
        read = total(keys)
        same = [id(s) for s in keys] == [id(s) for s in values]
        passes = (*keys, *(v for v in values if not any(v is k for k in keys)))
        lists = [s for s in passes if isinstance(s, (Lists, PackedLists))]
        # an int is filled in on the device: copying it there would be a sync
        extra = self._shared(call, metadata) if isinstance(metadata, int) else self._total(metadata)
        extra = _sum([extra, *(self._list_bytes(call, s) for s in lists)], dense)
        over = _sum([self._overflowed(s) for s in {id(s): s for s in lists}.values() if isinstance(s, Lists)], dense)
        return torch.stack([read, read if same else total(values), extra, dense, over, self._rows(call)])

    def _total(self, per_row: Tensor) -> Tensor:
        """The sum [] of [R, ...] over the rows that count."""
        return _counting(per_row, self.ended, 0).sum()

    def _rows(self, call: LayerCall) -> Tensor:
        """Rows that count: int64 []."""
        pos = call.rows.pos
        name = ("rows", pos.shape[0])
        if name not in self._known:
            everyone = torch.full((), pos.shape[0], dtype=torch.int64, device=pos.device)
            self._known[name] = everyone if self.ended is None else everyone - self.ended.sum()
        return self._known[name]

    def _shared(self, call: LayerCall, all_rows: int) -> Tensor:
        """What of an amount for all rows alike falls to those that count: int64 []."""
        pos = call.rows.pos
        whole = torch.full((), all_rows, dtype=torch.int64, device=pos.device)
        return whole if self.ended is None or not all_rows else whole * self._rows(call) // max(1, pos.shape[0])

    def _reads(self, call: LayerCall, selection: Selection) -> Tensor:
        """Keys streamed by all rows in all KV heads: int64 []."""
        if isinstance(selection, (Lists, PackedLists)) and selection.in_sight:
            return self._in_sight(call, selection)[0]
        name = self._name(selection)
        if name is None:
            return self._total(selection.reads(call.rows, call.kv))
        name = (self._where(call), name)
        if name not in self._known:
            self._known[name] = self._total(selection.reads(call.rows, call.kv))
        return self._known[name]

    def _list_bytes(self, call: LayerCall, lists: Lists | PackedLists) -> Tensor:
        """`list_bytes` of all rows: int64 []."""
        if not lists.in_sight:
            return self._total(list_bytes(lists, call.rows, call.kv))
        return self._in_sight(call, lists)[1] * _entry_bytes(lists)

    def _in_sight(self, call: LayerCall, lists: Lists | PackedLists) -> Tensor:
        """int64 [2]: the keys that all KV heads read by lists in sight, and the entries that name them.

        Lists that many layers use, each through a head map of its own, are looked at once.
        """
        *made, head_of = self._lists_name(lists)
        name = ("in sight", self._where(call), *made)
        if name not in self._known:
            both = _per_row(lists, call.rows, call.kv)
            self._known[name] = torch.stack([_counting(x, self.ended, 0).sum(0) for x in both])
        name = (*name, head_of, call.kv.heads)
        if name not in self._known:
            heads = self._known[name[:-2]]  # [2, entries of the head axis]
            if heads.shape[1] == 1:
                self._known[name] = heads[:, 0] * call.kv.heads
            else:
                self._known[name] = (heads if lists.head_of is None else heads[:, lists.head_of.long()]).sum(1)
        return self._known[name]

    def _overflowed(self, lists: Lists) -> Tensor:
        """Lists that overflowed, but for those of rows that do not count: int64 []."""
        self._kept.append(lists.count)
        name = ("overflowed", id(lists.count), lists.index.shape[2])
        if name not in self._known:
            of_rows = lists.list_of is None
            self._known[name] = (self._total(lists.overflowed) if of_rows else lists.overflowed.sum()).long()
        return self._known[name]

    def _name(self, selection: Selection) -> Hashable:
        """What tells spans, and lists in sight, from others; None for what would have to be kept whole for it."""
        if isinstance(selection, (Lists, PackedLists)):
            return self._lists_name(selection) if selection.in_sight else None
        if not isinstance(selection, Spans):
            return None
        if all(isinstance(bound.value, int) for span in selection.spans for bound in span):
            return (selection.spans, selection.per)
        self._kept.append(selection)
        return id(selection)

    def _lists_name(self, lists: Lists | PackedLists) -> tuple[Hashable, ...]:
        """What tells lists in sight from others as far as they are counted, whatever they name; the head map last."""
        if isinstance(lists, PackedLists):
            count, size = lists.offsets, lists.heads
        else:
            count, size = lists.count, lists.index.shape[2]
        self._kept.append((count, lists.list_of, lists.head_of))
        return (type(lists), size, id(count), id(lists.list_of), _entry_bytes(lists), id(lists.head_of))

    def _where(self, call: LayerCall) -> Hashable:
        rows, kv = call.rows, call.kv
        parts = (rows.seq, rows.pos, kv.filled, kv.block_table, kv.slot_pos)
        self._kept.append(parts)
        return (*map(id, parts), rows.q.shape[1], kv.heads, kv.page)


class _Streams(NamedTuple):
    """What a kernel has counted of one layer, as Outcome has it: [R, G, 2]; dense: keys [] of the rows that count."""

    counted: Tensor
    dense: Tensor
    rows: Tensor
    vector: int


def _counting(x: Tensor, ended: Tensor | None, axis: int) -> Tensor:
    """x with 0 for rows, along `axis`, that do not count."""
    if ended is None:
        return x
    return x.masked_fill(ended.view(*(1,) * axis, -1, *(1,) * (x.dim() - axis - 1)), 0)


def _columns(found: list[Tensor | _Streams], ended: Tensor | None) -> Tensor:
    """COLUMNS of each layer of a pass, [L, 6]; those of layers that counted alike are added up together."""
    alike: dict[Hashable, list[int]] = {}
    for n, x in enumerate(found):
        if isinstance(x, _Streams):
            alike.setdefault((x.vector, x.counted.shape, id(x.dense), id(x.rows)), []).append(n)
    columns: list[Tensor | None] = [x if isinstance(x, Tensor) else None for x in found]
    for numbers in alike.values():
        some = [x for n in numbers if isinstance(x := found[n], _Streams)]
        _, dense, rows, vector = some[0]
        counted = _counting(torch.stack([x.counted for x in some]), ended, 1).sum((1, 2))
        read, metadata = counted.unbind(1)
        read = read * vector
        every = (read, read, metadata, dense * (2 * vector), torch.zeros_like(dense), rows)
        stacked = torch.stack([x.expand(len(some)) for x in every], 1)
        if len(some) == len(found):
            return stacked
        for n, row in zip(numbers, stacked, strict=True):
            columns[n] = row
    return torch.stack([x for x in columns if x is not None])


def list_bytes(lists: Lists | PackedLists, rows: Rows, kv: KVView) -> Tensor:
    """Bytes of list entries in use, log-weights included, that one pass reads for each row: int64 [R]."""
    used = _per_row(lists, rows, kv)[1]
    if used.shape[1] == 1:
        used = used * kv.heads  # every KV head reads the list that serves them all
    elif lists.head_of is not None:
        used = used[:, lists.head_of.long()]  # each head reads the list it uses
    return used.sum(1) * _entry_bytes(lists)


def _per_row(lists: Lists | PackedLists, rows: Rows, kv: KVView) -> tuple[Tensor, Tensor]:
    """int64 [R, entries of the head axis], twice: the keys of lists in sight, and the entries in use of any lists."""
    if isinstance(lists, PackedLists):
        used = lists.offsets.long().diff().unflatten(0, (-1, lists.heads))
        used = used if lists.list_of is None else used[lists.list_of.long()]
        return used, used
    count, over = lists.count.long(), lists.overflowed
    if lists.list_of is not None:
        count, over = count[lists.list_of.long()], over[lists.list_of.long()]
    used = count.masked_fill(over, 0)  # an overflowed list is not read, its row is dense
    return torch.where(over, slots_seen(rows, kv)[:, None], count), used


def _entry_bytes(lists: Lists | PackedLists) -> int:
    weight = lists.log_weight
    return lists.index.element_size() + (0 if weight is None else weight.element_size())


def _sum(counts: Sequence[Tensor], zero: Tensor) -> Tensor:
    """int64 []. zero: what the sum of nothing looks like."""
    found = counts[0] if counts else torch.zeros_like(zero)
    for more in counts[1:]:
        found = found + more
    return found


@dataclass(frozen=True)
class LayerReport:
    """One layer in one phase. Bytes are of keys, values and metadata read, beside what dense attention reads.

    rows: those that count; longreach's decode loop leaves out the rows of sequences that have ended.
    notes: what the method has to say besides, None where it notes nothing; its "note", if it has one, in a few words.
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
    dense_because: tuple[str, ...]
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
        for row in rows:
            if row["notes"] is None:
                del row["notes"]
        return {"prefill": self.fraction("prefill"), "decode": self.fraction("decode"), "layers": rows}

    def __str__(self) -> str:
        shares = "".join(f"{name:>9}" for name in ("K", "V", "meta"))
        head = f"{'phase':8}{'layer':>6}  {'method':14}{'impl':11}{'rows':>9}{shares}{'of dense':>10}  note"
        lines = [head]
        for r in self.layers:
            d = max(r.dense_bytes, 1)
            shares = "".join(f"{x / d:>9.1%}" for x in (r.key_bytes, r.value_bytes, r.metadata_bytes))
            says = [r.notes["note"]] if r.notes and "note" in r.notes else []
            note = "; ".join((*(f"dense: {why}" for why in r.dense_because), *says))
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
