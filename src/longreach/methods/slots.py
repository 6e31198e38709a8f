"""Bases of methods that fill the fuse and the evict slot; those of prefill and decode are in base.py."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from longreach.cache import StatelessOnTruncate
from longreach.errors import Unsupported
from longreach.methods.base import AttentionMethod, Configured, PromptObserver
from longreach.methods.call import LayerCall, Meter, ModelShape
from longreach.ops import KVView, RowRange, Rows

LOGIT_BYTES = 256 << 20  # of the prompts for which keys are chosen together, in fp32


@dataclass(frozen=True, eq=False)
class PromptParts:
    """Which tokens of a prompt of N have stored keys and values. Fields are [N], on the host; properties on `device`.

    stored: bool. exact: bool, stored tokens whose keys and values equal a plain prefill's: their chunk was computed
    behind the same tokens that stand before it. before, after: int64, tokens of the same chunk before and after this
    one; 0 outside chunks. question: the first token after the last chunk. dependence: float64, of each stored token
    how far its keys and values move when other tokens stand before its chunk, 0 elsewhere; None where a chunk that is
    not exact was stored without. device: the model's.
    """

    stored: Tensor
    exact: Tensor
    before: Tensor
    after: Tensor
    question: int
    dependence: Tensor | None = None
    device: torch.device | str = "cpu"

    @cached_property
    def at(self) -> Tensor:
        """int64 [S]: the stored tokens."""
        return self.index(self.stored)

    @cached_property
    def computed(self) -> Tensor:
        """int64 [N - S]: the other tokens."""
        return self.index(~self.stored)

    @cached_property
    def candidates(self) -> Tensor:
        """bool [N]: the tokens that a ratio may be spent on."""
        return (self.stored & ~self.exact).to(self.device, non_blocking=True)

    @cached_property
    def candidates_at(self) -> Tensor:
        """int64 [C]: the tokens that a ratio may be spent on."""
        return self.index(self.stored & ~self.exact)

    @cached_property
    def candidate_count(self) -> int:
        return int((self.stored & ~self.exact).sum())

    def index(self, mask: Tensor) -> Tensor:
        """int64: where a mask [N] on the host is true, as an index on `device`. Does not wait for the device."""
        return mask.nonzero()[:, 0].to(self.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class FullLayer:
    """A layer that chooses tokens to recompute.

    call: the question's rows over the keys of all tokens, which are in the cache. values: [N, G, D], computed for all
    tokens; in a probe of no rows. stored_values: makes those of the chunks, [S, G, D], S the stored tokens in ascending
    order.
    """

    call: LayerCall
    values: Tensor
    stored_values: Callable[[], Tensor]


@dataclass(frozen=True)
class Fusion(Configured, ABC):
    """Base of methods that fill the fuse slot. Subclasses are frozen dataclasses of options.

    full_layers: layers that run for all tokens before tokens are chosen. At the last one keys and values of all tokens
        replace the stored ones; chosen tokens alone attend there and run from there on. 0: they run from the start.
    true_positions: whether stored keys are rotated to where their tokens stand, else to where they were computed.
    needs_dependence: whether chunks must be stored with the dependence of their tokens.
    compares_values: whether stored values of the last full layer are needed to choose; they are then copied beforehand.
    """

    full_layers: ClassVar[int] = 0
    true_positions: ClassVar[bool] = True
    needs_dependence: ClassVar[bool] = False
    compares_values: ClassVar[bool] = False

    def probes(self, model: ModelShape) -> tuple[int, ...]:
        """Layers up to which the question runs to choose, one after the other; none for methods that do without.

        Raises InvalidInput for an option that does not fit the model.
        """
        return ()

    def check(self, model: ModelShape) -> None:
        """Raise Unsupported for a model of too few layers to choose in, InvalidInput as `probes`."""
        if model.layers <= self.full_layers:
            raise Unsupported(
                f"fuse={self.name} chooses tokens in layer {self.full_layers}, and the model's last layer is "
                f"{model.layers - 1}; use a method without layers that run for all tokens, such as dependence"
            )
        self.probes(model)

    @abstractmethod
    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        """int64 [r]: the stored tokens that are recomputed, ascending; none that is exact. layer: the last full one or
        the probe's; else None.

        Their number depends on the prompt alone, so that the host never waits for the device.
        """


def slots_seen(first: int, rows: int) -> int:
    """Slots that consecutive rows see, added up: the first row lies in slot `first`, each next one in the next slot."""
    return rows * (2 * first + rows + 1) // 2


class LastRows(StatelessOnTruncate):
    """Queries of the last `size` rows of each sequence's prompt, in one layer, by slot of the row modulo size."""

    def __init__(self, call: LayerCall, size: int, slots: int):
        device = call.rows.q.device
        self.size, self.call = size, call
        self.q = call.rows.q.new_zeros(slots, size + 1, *call.rows.q.shape[1:])  # the last entry takes older rows
        self.pos = torch.full((slots, size + 1), -1, dtype=torch.int64, device=device)

    def reset(self, slots: Tensor) -> None:
        self.pos[slots] = -1

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Forget the rows past the cut. Lengths are in tokens: only sequences without eviction are cut there."""
        here = self.pos[slots]
        self.pos[slots] = here.masked_fill(here >= lengths[:, None], -1)

    def snapshot(self) -> Callable[[], None]:
        """Rows of a prompt that is rolled back have taken the place of older ones, which may still vote."""
        q, pos = self.q.clone(), self.pos.clone()

        def restore() -> None:
            self.q.copy_(q)
            self.pos.copy_(pos)

        return restore

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> LastRows:
        new = copy.copy(self)
        with torch.inference_mode(False), torch.no_grad():
            new.q, new.pos = self.q[slots], self.pos[slots]
        return new

    def to_save(self) -> dict[str, Tensor]:
        """Nothing: caches are not saved while rows are still to vote, or a plan is to be made of them."""
        return {}

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.pos.nbytes

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        self.truncate(slots, lengths)

    def note(self, call: LayerCall) -> None:
        rows = call.rows
        if rows.runs is not None:  # sequence ends are on the host: only the last rows are copied
            index, start = list[Tensor](), 0
            for run in rows.runs:
                index.append(torch.arange(start + max(0, run.rows - self.size), start + run.rows))
                start += run.rows
            rows = rows.take(torch.cat(index).to(rows.pos.device))
        at, pos = rows.seq.long(), rows.pos.long()
        recent = pos >= call.kv.seq_lens.long()[at] - self.size
        place = call.slots.long()[at], torch.where(recent, pos % self.size, self.size)
        self.q[place], self.pos[place] = rows.q, pos
        # the pass's own tensors (rows, those that its functions hold) are freed with it
        none = rows.take(torch.arange(0, device=pos.device))
        self.call = replace(call, rows=none, pre_rope=None, rotary=None, shared={}, index=None)

    def noted(self, pos: Sequence[int], length: int, last: int) -> tuple[tuple[int, int], ...]:
        """(entry, pos) of the noted rows among the last `last` of a sequence of `length` slots, positions ascending.

        pos: the sequence's part of `self.pos`, on the host.
        """
        low = max(0, length - min(last, self.size))
        return tuple((n, p) for p, n in sorted((p, n) for n, p in enumerate(pos[: self.size]) if low <= p < length))

    def rows(self, noted: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> Rows:
        """Noted rows of some sequences, one sequence after the other.

        noted: (slot, (entry, pos) of each of its rows), as `PromptEnd` has them; a row's seq is the slot.
        """
        each = [(slot, *row) for slot, rows in noted for row in rows]
        sent = torch.tensor(each, dtype=torch.int64).view(-1, 3).T.contiguous()
        slot, entry, pos = sent.to(self.q.device, non_blocking=True)
        runs = tuple(RowRange(len(rows), slot) for slot, rows in noted)
        return Rows(self.q[slot, entry], slot, pos, runs=runs)


@dataclass(frozen=True)
class PromptEnd:
    """A prompt that keys are evicted from, and its last rows in one layer.

    slot: of the sequence. length: slots in use. first, last: how many of them stay in any case, at both ends. rows:
    (entry in `LastRows`, pos) of each row that was noted, in the last slots, positions ascending.
    """

    slot: int
    length: int
    first: int
    last: int
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Eviction(PromptObserver, ABC):
    """Base of methods that fill the evict slot. Subclasses are frozen dataclasses of options.

    window: rows at a prompt's end whose queries are kept until then; under fusion the question's rows take their place.
    Layers with a sliding window keep all keys.
    """

    window: int = 32

    keeps = "sequences"
    observes_prompt = True

    def new_state(self, call: LayerCall, slots: int) -> LastRows:
        return LastRows(call, self.window, slots)

    def observe_prompt(self, call: LayerCall, state: object) -> None:
        assert isinstance(state, LastRows)
        state.note(call)

    def check_parts(self, length: int, first: int, last: int) -> None:
        """Raise InvalidInput where a prompt of `length` tokens has more that are to stay, at its ends, than may."""

    def keeps_all(self, length: int) -> bool:
        """Whether a sequence of `length` slots keeps all of them."""
        return False

    @abstractmethod
    def keep(self, call: LayerCall, prompts: Sequence[PromptEnd]) -> Sequence[Tensor]:
        """int64 [G, n] for each prompt: the slots that each KV head keeps, ascending. Does not wait for the device.

        call: the rows of all prompts (`PromptEnd.rows`), one prompt after the other, over the layer's keys; a row's
        sequence is its prompt's slot. None of the prompts keeps all.
        """

    def kept(
        self, state: LastRows, view: KVView, slots: Sequence[int], lengths: Sequence[int], first: int,
        windows: Sequence[int] | None = None, meter: Meter | None = None, pos: Sequence[Sequence[int]] | None = None,
    ) -> dict[int, Tensor]:  # fmt: skip
        """slot -> the entries its sequence keeps in one layer; sequences that keep all are left out.

        view: all sequences of the cache, by slot. lengths: slots in use of each of `slots`. windows: rows at the end of
        each prompt, at most `window`; None for `window` of all. meter: counts what choosing reads; None for one of its
        own. pos: `state.pos` on the host; None waits for the device. Sequences are chosen for together, as many as have
        logits of LOGIT_BYTES.
        Raises what `check_parts` raises.
        """
        meter, pos = Meter() if meter is None else meter, state.pos.tolist() if pos is None else pos
        windows = [self.window] * len(slots) if windows is None else windows
        prompts = list[PromptEnd]()
        for slot, length, window in zip(slots, lengths, windows, strict=True):
            noted = state.noted(pos[slot], length, window)
            if noted:
                prompts.append(PromptEnd(slot, length, min(first, length), min(window, length), noted))
        for prompt in prompts:
            self.check_parts(prompt.length, prompt.first, prompt.last)
        row = 4 * state.q.shape[2] * view.capacity  # bytes of its logits in fp32
        kept = dict[int, Tensor]()
        for some in _groups([p for p in prompts if not self.keeps_all(p.length)], row):
            rows = state.rows([(p.slot, p.rows) for p in some])
            addresses = torch.arange(len(view.seq_lens), device=view.k.device)
            call = replace(state.call, rows=rows, kv=view, slots=addresses, meter=meter)
            kept |= zip((p.slot for p in some), self.keep(call, some), strict=True)
        return kept


def _groups(prompts: Sequence[PromptEnd], row: int) -> Iterator[list[PromptEnd]]:
    """Prompts whose rows, of `row` bytes of logits each, take up to LOGIT_BYTES together; at least one at a time."""
    some, held = list[PromptEnd](), 0
    for prompt in prompts:
        size = row * len(prompt.rows)
        if some and held + size > LOGIT_BYTES:
            yield some
            some, held = [], 0
        some.append(prompt)
        held += size
    if some:
        yield some


def check_fusion(fuse: Fusion | None, prefill: AttentionMethod) -> None:
    """Raise Unsupported for a prefill method that does not go with fusion."""
    if fuse is not None and prefill.name != "dense":
        raise Unsupported(
            f"fuse={fuse.name} with prefill={prefill.name}: recomputed tokens attend densely; leave prefill out"
        )


def check_eviction(evict: Eviction | None, decode: AttentionMethod, *, fused: bool) -> None:
    """Raise Unsupported if a method cannot decode after eviction, InvalidInput if the window exceeds the capacity."""
    if evict is None:
        return
    why = decode.eviction_refusal()
    if why is not None:
        raise Unsupported(f"evict={evict.name} with decode={decode.name}: {why}; decode with another method")
    if not fused:  # then the question's rows take the window's place
        evict.check_parts(sys.maxsize, 0, evict.window)
