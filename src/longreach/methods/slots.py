"""Bases of methods that fill the fuse and the evict slot; those of prefill and decode are in base.py."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from longreach.cache import StatelessOnTruncate
from longreach.errors import Unsupported
from longreach.methods.base import AttentionMethod, Configured, PromptObserver
from longreach.methods.call import LayerCall, Meter, ModelShape
from longreach.ops import KVView, Rows


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

    def rows(self, slot: int, seq: int, length: int, last: int | None = None) -> Rows:
        """The noted rows of the sequence in `slot`, which holds `length` slots, as rows of sequence `seq` of a view.

        last: how many at most; None for `size`.
        """
        pos = self.pos[slot, : self.size]
        index = (
            (pos >= max(0, length - (self.size if last is None else min(last, self.size)))) & (pos < length)
        ).nonzero()[:, 0]
        return Rows(self.q[slot, index].contiguous(), torch.full_like(index, seq), pos[index])


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

    @abstractmethod
    def keep(self, call: LayerCall, length: int, first: int, last: int) -> Tensor | None:
        """int64 [G, n]: the slots of a sequence that each KV head keeps, ascending; None for all.

        call: rows at the prompt's end, in its last slots, over the layer's keys; the sequence holds `length` slots. The
        `first` and `last` of them are to stay. Raises InvalidInput where these are more than may stay.
        """

    def kept(
        self, state: LastRows, view: KVView, slots: Sequence[int], lengths: Sequence[int], first: int,
        windows: Sequence[int] | None = None, meter: Meter | None = None,
    ) -> dict[int, Tensor]:  # fmt: skip
        """slot -> the entries its sequence keeps in one layer; sequences that keep all are left out.

        view: all sequences of the cache, by slot. lengths: slots in use of each of `slots`. windows: rows at the end of
        each prompt, at most `window`; None for `window` of all. meter: counts what choosing reads; None for one of its
        own.
        """
        found, meter = dict[int, Tensor](), Meter() if meter is None else meter
        windows = [self.window] * len(slots) if windows is None else windows
        for slot, length, window in zip(slots, lengths, windows, strict=True):
            rows = state.rows(slot, slot, length, window)
            if not len(rows.pos):
                continue
            addresses = torch.arange(len(view.seq_lens), device=view.k.device)
            call = replace(state.call, rows=rows, kv=view, slots=addresses, meter=meter)
            index = self.keep(call, length, min(first, length), min(window, length))
            if index is not None:
                found[slot] = index
        return found


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
