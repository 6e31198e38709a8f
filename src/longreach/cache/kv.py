"""The KV cache: ragged sequences in contiguous or paged memory, with the state of methods.

A forward pass writes in three steps. `begin` (or `place`) makes room and returns the place of each token, or raises
with nothing changed. `append` writes a layer on the device. `commit` makes the tokens count. A pass that fails before
`commit` never counts; `abort` releases its pages and truncates state.

Tokens have positions, and in each layer slots. They are the same until `keep` evicts keys of a layer: the kept ones
then move to the first slots, each head's in the order of their positions, and new tokens take the slots after them.
So in every head the order of slots is the order of positions, and causality by slot is exact.

With `CacheConfig(host=True)` some layers lie in host memory, and the GPU reads and writes them in place (`tiers.py`).
A pass of many rows writes its keys to host memory and to a staging buffer, and attends to the buffer, into which the
keys before the pass are copied while the layer before it runs. Passes of few rows, captured ones among them, attend to
host memory itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longreach.cache.append import Append
from longreach.cache.checks import (
    check_appended,
    check_counts,
    check_rows,
    check_slots,
    checked_kept,
    checked_positions,
    is_int,
)
from longreach.cache.compact import Pair, as_pair, compacted
from longreach.cache.config import CacheConfig
from longreach.cache.host import allocate
from longreach.cache.host_pool import HostPool
from longreach.cache.layer_memory import LayerMemory
from longreach.cache.layouts import Layouts
from longreach.cache.placing import placements, sequences_and_positions
from longreach.cache.staging import Staging
from longreach.cache.state import SequenceState, StatelessOnTruncate
from longreach.cache.tiers import CPU_ATTENDS, HostAttend, MemoryUse, check_attend
from longreach.errors import InvalidInput, Unsupported
from longreach.ops.append import append
from longreach.ops.host_calls import HostCalls
from longreach.ops.place import place as ops_place
from longreach.ops.rope import RotaryAngles
from longreach.ops.types import INTS, KVView, RowRange, describe, require

IN_PLACE = 8  # the most rows of a sequence for which a pass reads host memory in place, without staging


class KVCache:
    """K and V of every layer for `slots` sequences, [P, G, page, D] each, allocated when a layer first appends.

    lengths: tokens of each sequence, which is the position of the next one. state: reset and truncated with the
    sequences. layouts: slots and pages of each layer. memory: their keys and values. attend: who computes a decode
    step's attention to layers in host memory; views that are made later follow it. calls: by which the CPU computes it,
    with the memory that they use. Captured steps need it as long as they exist.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        config: CacheConfig | None = None,
        device: torch.device | str = "cpu",
        state: SequenceState | None = None,
        resident: Collection[int] = (),
    ):
        """resident: with `CacheConfig(host=True)` the layers that stay in device memory first."""
        require(layers >= 1 and slots >= 1, f"expected at least one layer and slot, got {layers} and {slots}")
        self.config = config or CacheConfig()
        self.device = torch.empty(0, device=device).device  # with its index: "cuda" is not "cuda:0"
        self.state: SequenceState = StatelessOnTruncate() if state is None else state
        self.lengths = [0] * slots
        self.layouts = Layouts(layers, self.config.plan(slots))
        self.memory = LayerMemory(self.config, layers, resident, self.device)
        self._staging = Staging(self.device)
        check_attend(self.config, self.device)
        self.calls = HostCalls(self.device, partial(allocate, purpose=CPU_ATTENDS))
        self.attend = HostAttend("cpu") if self.config.host_attend == "cpu" else HostAttend()
        self._moves = 0
        self._evicted = False  # whether some layer's memory was shrunk
        self._begun = 0
        self._under_way = [0] * slots  # number of the unfinished pass on the slot; 0 for none
        self._overwritten: dict[int, int] = {}  # slot -> first position in use that the pass under way writes over

    def use_pool(self, pool: HostPool) -> None:
        """Take host memory from a pool, before any is allocated. Needs a fixed capacity, as the memory cannot grow."""
        require(not any(self.memory), "use_pool: the cache already has memory; call it on an empty cache")
        require(self.config.capacity is not None, "use_pool: expected a fixed size; give CacheConfig(capacity=...)")
        self.memory.use_pool(pool)

    def begin(self, slots: Sequence[int], counts: Sequence[int]) -> Append:
        """Make room for counts[b] new tokens of the sequence in slots[b]. Raises CapacityError, InvalidInput.

        An unfinished pass on one of the slots counts as failed: see `abort`.
        """
        before = self._begin("begin", slots, counts)
        return self._append(slots, None, before, counts, counts, before)

    def place(
        self, slots: Sequence[int], positions: Sequence[Sequence[int] | Tensor], *, overwrite: bool = False
    ) -> Append:
        """Begin a pass over rows at given positions: to import keys and values, or to overwrite some.

        positions: for each sequence, in ascending order, on the host. From the sequence's length on they must have no
        gap. overwrite: allow any positions below it; `append` then replaces their keys and values.
        An overwriting pass that is not committed cannot be undone: its sequences are cut to the first position that it
        was to overwrite. Raises CapacityError, InvalidInput; Unsupported to overwrite where keys were evicted, or if a
        state cannot be cut.
        State follows. State of tokens is computed again as their keys are written. State of sequences is cut to the
        first overwritten position: methods that keep any must observe the tokens from there on again.
        """
        check_slots("place", slots, len(self.lengths), "positions", positions)
        each = list(zip(slots, positions, strict=True))
        rows = [checked_positions(s, self._intact(s), p, overwrite) for s, p in each]
        over = {s: int(p[0]) for s, p in zip(slots, rows, strict=True) if p.numel() and p[0] < self._intact(s)}
        for slot, first in over.items():
            self.layouts.check_overwrite(slot, first)
        counts = [p.numel() for p in rows]
        added = [int((p >= self._intact(s)).sum()) for s, p in zip(slots, rows, strict=True)]
        cut = self._ints(list(over)), self._ints(list(over.values()))
        self.state.check_truncate(*cut)  # a pass that fails is cut there
        before = self._begin("place", slots, added)
        self._overwritten |= over
        if over:
            self.state.overwrite(*cut)
        firsts = [int(p[0]) if p.numel() else n for p, n in zip(rows, before, strict=True)]
        lasts = [int(p[-1]) if p.numel() else n - 1 for p, n in zip(rows, before, strict=True)]
        gapless = all(last - first == n - 1 for first, last, n in zip(firsts, lasts, counts, strict=True))
        pos = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(self.device)
        return self._append(slots, pos, before, counts, added, firsts if gapless else None)

    def reserve(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for counts[b] more tokens in slots[b] now, so that later passes need not. Raises as `begin`.

        An empty cache gets exactly that room, but at least its first size; later growth doubles.
        """
        self._begin("reserve", slots, counts, exact=not any(self.memory))
        for slot in slots:
            self._under_way[slot] = 0

    def begin_run(self, step: Append, passes: int) -> Append:
        """Begin `passes` consecutive passes like `step`, with its tensors and a new number. Raises as `begin`.

        All have room from now on. `commit(..., over=False)` commits one of them, `end_run` ends them.
        """
        self._begin("begin_run", step.host_slots, [n * passes for n in step.added])
        return replace(step, number=self._begun)

    def end_run(self, step: Append) -> None:
        """End the passes of `begin_run` and release unused room."""
        self._check_open(step)
        self._cut({s: self.lengths[s] for s in step.host_slots})

    def append(
        self, layer: int, step: Append, k: Tensor, v: Tensor, rows: Tensor | None = None,
        angles: RotaryAngles | None = None,
    ) -> None:  # fmt: skip
        """Write the tokens of one layer. k, v: [R, G, D] in the order of step.seq and step.pos.

        v may be k itself, in all passes of the layer: the layer then holds one memory for both (MLA's latent).

        rows: int [r] on the cache's device, each in [0, R) and at most once: the rows of the pass that k and v
            [r, G, D] belong to, if not all are written at once. Before the layer is attended to, all rows at new
            positions must be written, as it would hold no key for the others.
        angles: of these rows; k is rotated by them as it is written. None: k is written as it is.
        Raises InvalidInput. The values of `rows` are checked on a CPU only: elsewhere that would be a device sync.
        """
        self._check_layer(layer)
        self._check_open(step)
        place = step.at(layer)
        if rows is not None:
            ok = isinstance(rows, Tensor) and rows.dim() == 1 and rows.dtype in INTS and rows.device == self.device
            require(ok, lambda: f"rows: expected int [r] on {self.device}, got {describe(rows)}")
            check_rows(rows, place.slot.shape[0])
            place = place.take(rows)
        count = place.slot.shape[0]
        held = self.memory[layer]
        check_appended(layer, k, v, count, self.device, held)
        with torch.inference_mode(False), torch.no_grad():
            if held is None:
                pages = self.layouts[layer].pages
                held = self.memory.make(layer, (pages.total, k.shape[1], pages.size, k.shape[2]), k, v)
            staged = self._staged(layer, step)
            for memory in (held,) if staged is None else (held, staged):
                if angles is None:
                    append(*memory, k, v, place.page, place.offset)
                else:
                    ops_place(*memory, k, v, place.page, place.offset, angles)
            if staged is not None:
                self._prefetch(layer, step)
        step.written[layer] += count
        if any(slot in self._overwritten for slot in step.host_slots):
            seq = step.seq if rows is None else step.seq[rows]
            self.state.written(layer, self.view(layer, step), seq, place.slot)

    def view(self, layer: int, step: Append) -> KVView:
        """The view that rows of this pass attend to: all tokens, the new ones included. Slot order is causal order."""
        place = step.at(layer)
        staged = self._staged(layer, step)
        calls = self.calls if staged is None and layer in self.in_host and self.attend.by == "cpu" else None
        k, v = staged or self._held(layer)
        return KVView(k, v, place.seq_lens, place.table, calls=calls, values_in_keys=v is k)

    def commit(self, step: Append, *, over: bool = True) -> None:
        """Make the pass's tokens count. over=False: another pass of its run follows.

        Raises InvalidInput if fewer rows were appended to a layer than the pass has new tokens. Passes of a run are not
        checked, as a captured one appends on the device alone.
        """
        self._check_open(step)
        new = sum(step.added)
        missing = [layer for layer in range(len(self.memory)) if over and step.written[layer] < new]
        require(
            not missing,
            lambda: (
                f"commit: expected the pass's {new} new tokens appended to every layer, got fewer in layers "
                f"{missing}; append them first, or abort the pass"
            ),
        )
        if over:
            self._staging.release()
        for slot, n in zip(step.host_slots, step.added, strict=True):
            self.lengths[slot] += n
            if over:
                self._under_way[slot] = 0
                self._overwritten.pop(slot, None)

    def abort(self, step: Append) -> None:
        """Undo a failed pass: release its pages and truncate state. No effect on a pass that is over.

        Overwritten keys are lost: those sequences are cut to the first position that the pass was to overwrite. If it
        was the first pass and not all layers got memory, all memory is released, so that a smaller request can follow.
        Raises Unsupported if a state cannot be truncated; K and V are correct even then.
        """
        self._drop([s for s in step.host_slots if self._under_way[s] == step.number])
        if not all(self.memory):
            self._start_over_if_empty()

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Drop the tokens past lengths[b] in slots[b].

        Raises, with nothing changed: Unsupported if a state cannot be truncated, or if keys were evicted from tokens
        that are to go (a sequence may always be cut to 0); InvalidInput for tokens that are not there, or that the
        current pass overwrites.
        """
        check_counts("truncate", slots, len(self.lengths), lengths)
        for slot, n in zip(slots, lengths, strict=True):
            held = self._intact(slot)
            require(n <= held, f"truncate: slot {slot} holds {held} tokens, cannot keep {n}")
            self.layouts.check_cut(slot, n)
        ends = dict(zip(slots, lengths, strict=True))
        self._truncate_state({s: n for s, n in ends.items() if n < self.lengths[s] or self._under_way[s]})
        self._cut(ends)
        if self._evicted:
            self._start_over_if_empty()

    def reset(self, slots: Sequence[int]) -> None:
        """Empty the slots for other sequences. When all are empty after evictions, memory is released."""
        check_slots("reset", slots, len(self.lengths))
        self.state.reset(self._ints(slots))
        self._cut(dict.fromkeys(slots, 0))
        if self._evicted:
            self._start_over_if_empty()

    def keep(
        self, layer: int, slots: Sequence[int], index: Sequence[Tensor] | Tensor, room: int = 0, *, check: bool = True
    ) -> None:
        """Evict all keys and values of a layer but those in the given slots, and release their memory.

        index: for each sequence int64 [G, n], on the cache's device: the slots that each KV head keeps, ascending; n
        may differ from sequence to sequence. room: tokens to come in each sequence; their memory is not released, so
        that it need not be taken again. Not during a pass. check: whether the values of `index` are checked, which
        waits for the device. False is for indices that are right by construction: wrong ones corrupt the cache.
        Layers with a sliding window must keep all keys, as slots are not positions after eviction. A
        `runtime.StateStore` refuses to evict once such a layer has attended. With another state the caller must not:
        `runtime.attend_layer` refuses the layer's later passes, and only `reset` helps then.
        Raises, with nothing changed: Unsupported if a state cannot follow, or for a cache with `host=True`;
        InvalidInput for slots not in use, kept twice or out of order, or if no slot is kept.
        """
        if self.config.host:
            raise Unsupported("keep: keys in host memory cannot be evicted; use CacheConfig(host=False)")
        check_slots("keep", slots, len(self.lengths), "an index", index)
        require(is_int(room, 0), lambda: f"keep: room: expected an int >= 0, got {room!r}")
        busy = [s for s, number in enumerate(self._under_way) if number]
        require(not busy, f"keep: a pass is under way in slots {busy}; commit or abort it first")
        memory = self._held(layer)
        asked = dict(zip(slots, index, strict=True))
        kept = checked_kept(asked, self.slots_in_use(layer), memory[0].shape[1], self.device, check)
        self.state.check_keep(layer)
        if not kept:
            return
        before = self.layouts[layer]
        after = before.evicted(self.lengths, {s: i.shape[1] for s, i in kept.items()}, room)
        with torch.inference_mode(False), torch.no_grad():
            self.memory.replace(layer, compacted(memory, before, after, kept))
        del memory  # before state is rebuilt, which may take memory of its own
        self.layouts[layer] = after
        self._moves, self._evicted = self._moves + 1, True
        self.state.kept(layer, self.view_of_all(layer))

    def slots_in_use(self, layer: int) -> list[int]:
        """Slots of each sequence that hold a token in this layer; fewer than its tokens after eviction."""
        self._check_layer(layer)
        return list(self.layouts[layer].in_use(dict(enumerate(self.lengths))).values())

    def evicted(self, layer: int) -> bool:
        """Whether keys of some sequence were dropped from this layer, so that slots are not positions."""
        return any(self.layouts[layer].dropped)

    @property
    def generation(self) -> int:
        """How often memory has moved, the cache's or that of its state: graphs captured earlier read the old memory."""
        return self._moves + self.state.generation

    @property
    def in_host(self) -> Set[int]:
        """Layers whose keys and values lie in host memory."""
        return self.memory.in_host

    @property
    def nbytes(self) -> int:
        """Bytes of K and V allocated, all layers, in device and host memory."""
        return sum(self.memory.layer_bytes())

    @property
    def memory_use(self) -> MemoryUse:
        """Where keys and values lie, and the bytes of each."""
        attend = None if self.device.type == "cpu" and self.attend == HostAttend() else self.attend
        return self.memory.use(attend, self.calls.nbytes)

    @property
    def page(self) -> int | None:
        """Tokens in a page; None if one page holds a whole sequence."""
        return self.config.page if self.config.kind == "paged" else None

    def _begin(self, what: str, slots: Sequence[int], counts: Sequence[int], exact: bool = False) -> list[int]:
        """Make room and open a pass on the slots; their lengths before it."""
        check_counts(what, slots, len(self.lengths), counts)
        self._drop([s for s in slots if self._under_way[s]])
        before = [self.lengths[s] for s in slots]
        after = {s: n + c for s, n, c in zip(slots, before, counts, strict=True)}
        sizes = self.layouts.sizes_for(after, exact)
        self.memory.plan(sizes)
        self._staging.release()
        if any((size, total) != (layout.pages.size, layout.pages.total) for layout, size, total in sizes):
            self._moves += 1
        for layout, size, total in sizes:
            self.memory.grow([n for n in range(len(self.memory)) if self.layouts[n] is layout], size, total)
        for layout, size, total in sizes:
            layout.take(after, size, total)
        self._begun += 1
        for slot in slots:
            self._under_way[slot] = self._begun
        return before

    def _append(
        self, slots: Sequence[int], pos: Tensor | None, before: Sequence[int], counts: Sequence[int],
        added: Sequence[int], firsts: Sequence[int] | None,
    ) -> Append:  # fmt: skip
        """The pass over rows at `pos` [R], or from firsts[b] on: each sequence's first position where known."""
        seq, pos = sequences_and_positions(counts, pos, firsts, self.device)
        runs = None
        if firsts is not None:
            runs = [RowRange(n, b, first) for b, (n, first) in enumerate(zip(counts, firsts, strict=True))]
        found = placements(self.layouts, self.page, slots, seq, pos, before, added, runs)
        host = (tuple(counts), tuple(added), tuple(slots), tuple(before))
        return Append(self._ints(slots), seq, pos, found, *host, self._begun)

    def _staged(self, layer: int, step: Append) -> Pair | None:
        """The layer's copy in device memory that the pass attends to; None if it attends to the layer itself."""
        if layer not in self.in_host or step.starts is None or max(step.counts, default=0) <= IN_PLACE:
            return None
        with torch.inference_mode(False), torch.no_grad():
            return self._staging.get((step.number, layer), self._held(layer), self._filled(layer, step))

    def _prefetch(self, layer: int, step: Append) -> None:
        """Begin to stage the next layer in host memory."""
        after = min((n for n in self.in_host if n > layer), default=None)
        if after is not None and any(step.starts or ()):
            self._staging.prefetch((step.number, after), self._held(after), self._filled(after, step))

    def _filled(self, layer: int, step: Append) -> list[tuple[int, int]]:
        """Page of each sequence of the pass, and its slots that hold keys, those that the pass has written included."""
        new = step.added if step.written[layer] else (0,) * len(step.added)
        return [(s, start + n) for s, start, n in zip(step.host_slots, step.starts or (), new, strict=True)]

    def _held(self, layer: int) -> Pair:
        """K and V of a layer, [P, G, page, D], of the layout's size."""
        self._check_layer(layer)
        held, pages = self.memory[layer], self.layouts[layer].pages
        if held is None:
            raise InvalidInput(f"layer {layer} holds no keys yet; append first")
        if (held[0].shape[0], held[0].shape[2]) == (pages.total, pages.size):
            return held
        return as_pair(held, lambda x: x[: pages.total, :, : pages.size])  # growth failed in a later layer

    def view_of_all(self, layer: int) -> KVView:
        """All sequences as they are, sequence b being that in slot b."""
        slots = range(len(self.lengths))
        tables = self.layouts.spread(list(self.layouts.tables(slots)))
        table = tables[layer if len(tables) > 1 else 0][:, : self.layouts[layer].width(slots)].to(self.device)
        k, v = self._held(layer)
        return KVView(k, v, self._ints(self.slots_in_use(layer)), table, values_in_keys=v is k)

    def _intact(self, slot: int) -> int:
        """Tokens of a sequence that no pass under way overwrites."""
        return min(self.lengths[slot], self._overwritten.get(slot, self.lengths[slot]))

    def _check_layer(self, layer: int) -> None:
        ok = is_int(layer, 0) and layer < len(self.memory)
        require(ok, lambda: f"layer: expected an int in [0, {len(self.memory)}), got {layer!r}")

    def _check_open(self, step: Append) -> None:
        ok = all(self._under_way[s] == step.number for s in step.host_slots)
        why = "this pass is over: it was committed or aborted, or its slots began another pass, were truncated or reset"
        require(ok, f"{why}; call begin again")

    def _drop(self, slots: Sequence[int]) -> None:
        """End passes under way on the slots as if they had never been."""
        ends = {s: self._intact(s) for s in slots}
        self._cut(ends)
        self._truncate_state(ends)

    def _cut(self, ends: dict[int, int]) -> None:
        self._staging.release()
        for slot, n in ends.items():
            self.lengths[slot] = n
            self._under_way[slot] = 0
            self._overwritten.pop(slot, None)
            self.layouts.cut(slot, n)

    def _truncate_state(self, ends: dict[int, int]) -> None:
        if ends:
            slots, lengths = self._ints(list(ends)), self._ints(list(ends.values()))
            self.state.check_truncate(slots, lengths)
            self.state.truncate(slots, lengths)

    def _start_over_if_empty(self) -> None:
        """If no slot holds anything, give all memory back, so that all layers have one layout again."""
        if not any(self.lengths) and not any(self._under_way):
            self.memory.clear()
            self.layouts = Layouts(len(self.memory), self.config.plan(len(self.lengths)))
            self._moves, self._evicted = self._moves + 1, False

    def _ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
