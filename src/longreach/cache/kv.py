"""The KV cache: ragged sequences in contiguous or paged memory, and the state methods keep beside them.

A forward pass appends in three moves: `begin` makes room and says where each new token goes (or raises with
nothing changed), `append` writes a layer on the device, `commit` makes the tokens count. A pass that fails
before `commit` never counted; `abort` gives back its pages and has state forget it.

Memory is allocated outside inference mode, so that a cache filled under it can be used without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from longreach.cache.pages import Pages
from longreach.errors import InvalidInput
from longreach.ops.append import append
from longreach.ops.types import FLOATS, KVView, Run, describe, require


@dataclass(frozen=True)
class CacheConfig:
    """How KV memory is laid out and how it grows. While it grows, old and new memory exist side by side.

    kind: "contiguous" (one buffer a sequence) or "paged" (pages of `page` tokens from a shared pool).
    capacity: tokens a sequence may hold; allocated at once and never grown. None: generate reserves prompt and
        longest answer at once; without it, or past it, memory starts at 256 tokens and doubles between steps
        until there is room, copying what it holds.
    page: tokens in a page (paged). pages: pages in the pool, allocated at once; None: the pool doubles.
    """

    kind: Literal["contiguous", "paged"] = "contiguous"
    capacity: int | None = None
    page: int = 64
    pages: int | None = None

    def __post_init__(self) -> None:
        require(self.kind in ("contiguous", "paged"), f"kind: expected 'contiguous' or 'paged', got {self.kind!r}")
        for name, value in (("capacity", self.capacity), ("page", self.page), ("pages", self.pages)):
            count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(count or (value is None and name != "page"), f"{name}: expected a count >= 1, got {value!r}")
        require(self.pages is None or self.kind == "paged", "pages: only a paged cache has a pool of pages")

    def plan(self, slots: int) -> Pages:
        if self.kind == "contiguous":
            return Pages(slots, self.capacity or 256, slots, True, limit=self.capacity)
        total = self.pages or slots * -(-(self.capacity or 256) // self.page)
        return Pages(slots, self.page, total, False, limit=self.capacity, most=self.pages)


class SequenceState(Protocol):
    """What a method remembers about sequences. Addressed by slot, never by batch row; slots, lengths: int64 [n].

    One whose memory may be replaced, as PerSlot's, counts that in `moved`; one that a cut leaves poorer than it was, as
    RowRing, is `Remembering` too.
    """

    def reset(self, slots: Tensor) -> None:
        """Forget the sequences in `slots`."""

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Raise Unsupported if the sequences in `slots` cannot be cut to `lengths` tokens. Changes nothing."""

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """The sequences in `slots` now end after `lengths` tokens; called once every state has agreed."""


@runtime_checkable
class Remembering(Protocol):
    """A SequenceState in which tokens overwrite what cutting them off does not bring back."""

    def remember(self) -> Callable[[], None]:
        """Copy all there is; what is returned puts the copy back in its place, once the tokens are cut off."""


class NothingToForget:
    """A SequenceState of which nothing is read past the tokens that a sequence holds, if anything is kept at all."""

    def reset(self, slots: Tensor) -> None:
        pass

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        pass

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Append:
    """Where the new tokens of one forward pass go.

    slots: int64 [B], the cache slot of each sequence of the pass; seq: int64 [R], its row in `slots`;
    pos: int64 [R], absolute position (the logical slot index); page, offset: int64 [R], place in memory;
    filled: int64 [B], tokens per sequence once the pass is done; table: int64 [B, pages];
    counts, host_slots: new tokens and slot per sequence, on the host; number: which pass of its cache it is.
    starts: tokens per sequence before the pass, None where only the device knows them.
    """

    slots: Tensor
    seq: Tensor
    pos: Tensor
    page: Tensor
    offset: Tensor
    filled: Tensor
    table: Tensor
    counts: tuple[int, ...]
    host_slots: tuple[int, ...]
    number: int = -1
    starts: tuple[int, ...] | None = None

    @property
    def runs(self) -> tuple[Run, ...]:
        """The new tokens as the host knows them, once they are appended."""
        starts = self.starts or (None,) * len(self.counts)
        return tuple(Run(n, b, first) for b, (n, first) in enumerate(zip(self.counts, starts, strict=True)))


class KVCache:
    """K and V of every layer for `slots` sequences, [P, G, page, D] each, allocated when a layer first appends."""

    def __init__(self, layers: int, slots: int, config: CacheConfig | None = None, device: torch.device | str = "cpu"):
        require(layers >= 1 and slots >= 1, f"expected at least one layer and slot, got {layers} and {slots}")
        self.config = config or CacheConfig()
        self.device = torch.empty(0, device=device).device  # with its index: "cuda" is not "cuda:0"
        self.pages = self.config.plan(slots)
        self.lengths = [0] * slots
        self.memory: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.state: dict[Hashable, SequenceState] = {}
        self._resized = 0
        self._begun = 0
        self._under_way = [0] * slots  # number of the pass that was begun on the slot and is not over; 0 for none

    def begin(self, slots: Sequence[int], counts: Sequence[int]) -> Append:
        """Make room for counts[b] new tokens of the sequence in slots[b]. Raises CapacityError, InvalidInput.

        A pass that was begun on one of the slots and never committed counts as failed: see `abort`.
        """
        before = self._begin("begin", slots, counts)
        start, new, table = self._ints(before), self._ints(counts), self.table(slots)
        seq = torch.repeat_interleave(torch.arange(len(slots), device=self.device), new, output_size=sum(counts))
        first = torch.cumsum(new, 0) - new
        pos = torch.arange(sum(counts), device=self.device) - first[seq] + start[seq]
        page, offset = table[seq, pos // self.pages.size], pos % self.pages.size
        at, host = self._ints(slots), (tuple(counts), tuple(slots))
        return Append(at, seq, pos, page, offset, start + new, table, *host, self._begun, tuple(before))

    def reserve(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Make room for counts[b] more tokens in slots[b] now, so that passes to come need none. Raises as `begin`.

        A cache that holds nothing yet gets just that room (and its first size at least), later ones double.
        """
        self._begin("reserve", slots, counts, exact=not any(self.memory))
        for slot in slots:
            self._under_way[slot] = 0

    def begin_run(self, step: Append, passes: int) -> Append:
        """Begin `passes` passes like `step`, one after another: its tensors, a number of its own. Raises as `begin`.

        All have room from now on. `commit(..., over=False)` counts one, `end_run` ends them.
        """
        self._begin("begin_run", step.host_slots, [n * passes for n in step.counts])
        return replace(step, number=self._begun)

    def end_run(self, step: Append) -> None:
        """The passes of `begin_run` are over; room they did not use goes back."""
        self._check_open(step)
        self._keep({s: self.lengths[s] for s in step.host_slots})

    def append(self, layer: int, step: Append, k: Tensor, v: Tensor) -> None:
        """Write the new tokens of one layer. k, v: [R, G, D] in the order of step.seq and step.pos."""
        self._check_layer(layer)
        self._check_open(step)
        rows = step.seq.shape[0]
        ok = isinstance(k, Tensor) and k.dim() == 3 and k.shape[0] == rows and k.dtype in FLOATS
        require(ok, f"k: expected float [R={rows}, G, D], got {describe(k)}")
        same = isinstance(v, Tensor) and v.shape == k.shape and v.dtype == k.dtype
        require(same, f"v: expected {describe(k)} like k, got {describe(v)}")
        on = k.device == self.device and v.device == self.device
        require(on, f"k, v: expected on {self.device} like the cache, got {describe(k)} and {describe(v)}")
        held = self.memory[layer]
        if held is not None:
            same = held[0].shape[1::2] == k.shape[1:] and held[0].dtype == k.dtype
            require(same, f"k: layer {layer} holds {describe(held[0])} [P, G, page, D], got {describe(k)}")
        with torch.inference_mode(False), torch.no_grad():
            if held is None:
                shape = (self.pages.total, k.shape[1], self.pages.size, k.shape[2])
                held = self.memory[layer] = (k.new_empty(shape), v.new_empty(shape))
            append(*held, k, v, step.page, step.offset)

    def view(self, layer: int, step: Append) -> KVView:
        """What the rows of this pass attend to: all tokens up to and including the new ones."""
        self._check_layer(layer)
        held = self.memory[layer]
        if held is None:
            raise InvalidInput(f"layer {layer} holds no keys yet; append before view")
        return KVView(held[0], held[1], step.filled, step.table)

    def commit(self, step: Append, *, over: bool = True) -> None:
        """The pass is done: its tokens count from now on. over=False: another pass of its run follows."""
        self._check_open(step)
        for slot, n in zip(step.host_slots, step.counts, strict=True):
            self.lengths[slot] += n
            if over:
                self._under_way[slot] = 0

    def abort(self, step: Append) -> None:
        """The pass failed: its pages go back and state forgets what it noted. A pass that is over is left alone.

        Where it was the first and not all layers got memory, that goes back too, so that less can be asked for.
        Raises Unsupported where a state cannot forget; K and V are right even then.
        """
        self._drop([s for s in step.host_slots if self._under_way[s] == step.number])
        if not all(self.memory) and not any(self.lengths) and not any(self._under_way):
            self.memory = [None] * len(self.memory)
            self.pages = self.config.plan(len(self.lengths))
            self._resized += 1

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Drop what lies past lengths[b] tokens in slots[b]. A state that cannot follow refuses, nothing changed."""
        self._check("truncate", slots, lengths)
        for slot, n in zip(slots, lengths, strict=True):
            held = self.lengths[slot]
            require(n <= held, f"truncate: slot {slot} holds {held} tokens, cannot keep {n}")
        ends = dict(zip(slots, lengths, strict=True))
        self._truncate_state({s: n for s, n in ends.items() if n < self.lengths[s] or self._under_way[s]})
        self._keep(ends)

    def reset(self, slots: Sequence[int]) -> None:
        """Empty the slots for other sequences."""
        self._check("reset", slots, [0] * len(slots))
        for state in self.state.values():
            state.reset(self._ints(slots))
        self._keep(dict.fromkeys(slots, 0))

    @property
    def resized(self) -> int:
        """How often memory has moved, the cache's or that of a state: what was captured before reads the old place."""
        return self._resized + sum(getattr(state, "moved", 0) for state in self.state.values())

    @property
    def nbytes(self) -> int:
        """Bytes of K and V allocated, all layers."""
        return sum(x.numel() * x.element_size() for held in self.memory if held for x in held)

    def table(self, slots: Sequence[int], width: int | None = None) -> Tensor:
        """int64 [B, width] on the device: the pages of each sequence; width: at least the most pages one holds."""
        held = [self.pages.held[s] for s in slots]
        most = max((len(h) for h in held), default=0) or 1
        require(width is None or width >= most, f"table: {most} pages do not fit into {width} columns")
        rows = [h + [0] * ((width or most) - len(h)) for h in held]  # entries past `filled` are never read
        return torch.tensor(rows, dtype=torch.int64, device=self.device).view(len(rows), width or most)

    def _begin(self, what: str, slots: Sequence[int], counts: Sequence[int], exact: bool = False) -> list[int]:
        """Make room and open a pass on the slots; their lengths before it."""
        self._check(what, slots, counts)
        self._drop([s for s in slots if self._under_way[s]])
        before = [self.lengths[s] for s in slots]
        after = {s: n + c for s, n, c in zip(slots, before, counts, strict=True)}
        size, total = self.pages.sizes_for(after, exact)
        if (size, total) != (self.pages.size, self.pages.total):
            self._resize(size, total)
        self.pages.take(after, size, total)
        self._begun += 1
        for slot in slots:
            self._under_way[slot] = self._begun
        return before

    def _check(self, what: str, slots: Sequence[int], counts: Sequence[int]) -> None:
        fits = len(slots) == len(counts) and len(set(slots)) == len(slots)
        require(fits, f"{what}: expected distinct slots and a number for each, got {list(slots)} and {list(counts)}")
        inside = all(0 <= s < len(self.lengths) for s in slots) and all(n >= 0 for n in counts)
        asked = f"{list(slots)} and {list(counts)}"
        require(inside, f"{what}: expected slots in [0, {len(self.lengths)}) and numbers >= 0, got {asked}")

    def _check_layer(self, layer: int) -> None:
        require(0 <= layer < len(self.memory), f"layer: expected in [0, {len(self.memory)}), got {layer}")

    def _check_open(self, step: Append) -> None:
        ok = all(self._under_way[s] == step.number for s in step.host_slots)
        why = "this pass is over: it was committed or aborted, or its slots were begun anew, cut or reset"
        require(ok, f"{why}; call begin again")

    def _drop(self, slots: Sequence[int]) -> None:
        ends = {s: self.lengths[s] for s in slots}
        self._keep(ends)
        self._truncate_state(ends)

    def _keep(self, ends: dict[int, int]) -> None:
        for slot, n in ends.items():
            self.lengths[slot] = n
            self.pages.release(slot, n)
            self._under_way[slot] = 0

    def _truncate_state(self, ends: dict[int, int]) -> None:
        if ends:
            slots, lengths = self._ints(list(ends)), self._ints(list(ends.values()))
            for state in self.state.values():
                state.check_truncate(slots, lengths)
            for state in self.state.values():
                state.truncate(slots, lengths)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    def _resize(self, size: int, total: int) -> None:
        """Move all layers to larger pages or more of them; an allocation that fails leaves the old memory in place."""

        def moved(old: Tensor) -> Tensor:
            new = old.new_empty(total, old.shape[1], size, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            return new

        with torch.inference_mode(False), torch.no_grad():
            self.memory = [held and (moved(held[0]), moved(held[1])) for held in self.memory]
        self._resized += 1
