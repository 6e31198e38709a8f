"""Where MKA's memory of earlier tokens lies: in a cache of plain transformers, or with longreach's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from longreach.adapters.transformers.cache_name import CACHE
from longreach.adapters.transformers.mka.cache_layers import Held, MemoryLayer, layer_of, memory_before
from longreach.adapters.transformers.step import Step
from longreach.cache.mix_state import MixState, Turn
from longreach.errors import InvalidInput, Unsupported
from longreach.mka.config import MKAConfig
from longreach.mka.fast import FastMemory
from longreach.mka.tokens import Tokens
from longreach.ops.types import accumulator

MEANS = "means"  # name of the state


class Memory(Protocol):
    """The memory of one layer in one pass."""

    def before(self, k: Tensor) -> FastMemory:
        """The memory before the pass. k: [R, G, D], the layer's new keys."""

    def after(self, memory: FastMemory) -> None:
        """Keep the memory after the pass."""


@dataclass
class PassMemory:
    """Under plain transformers: in the layer of a DynamicCache, or nowhere for a pass without one."""

    config: MKAConfig
    number: int
    tokens: Tokens
    layer: MemoryLayer | None

    @classmethod
    def of(cls, config: MKAConfig, number: int, tokens: Tokens, cache: Any) -> PassMemory:
        """cache: of the pass, or None. Raises Unsupported, InvalidInput."""
        if cache is None and not tokens.fresh:
            raise InvalidInput(
                f"{CACHE}: layers do not get the cache of this pass (gradient checkpointing drops it); call the model "
                f"without {CACHE}, or in eval mode"
            )
        return cls(config, number, tokens, None if cache is None else layer_of(cache, number))

    def before(self, k: Tensor) -> FastMemory:
        tokens = self.tokens
        units = -(-tokens.longest // self.config.block)
        fresh = FastMemory.empty(self.config, tokens.sequences, units, k.shape[1], k.shape[2], k.dtype, k.device)
        return fresh if self.layer is None else memory_before(self.layer, self.number, self.config, tokens, fresh)

    def after(self, memory: FastMemory) -> None:
        layer, tokens = self.layer, self.tokens
        if layer is None:
            return
        rows, length = tokens.shape
        past = 0 if layer.held is None or tokens.fresh else layer.held.count
        count = torch.full((rows,), length, device=tokens.seq.device) if tokens.real is None else tokens.real.sum(1)
        kept = memory if tokens.sequences == rows else None  # packed documents: none of them can be continued
        columns = layer.get_seq_length()
        held = Held(self.config, columns + length, past + count, kept, tokens.first_position)
        if held.can_cut:
            held = replace(held, real=self._real(columns))
        layer.held = held

    def _real(self, columns: int) -> Tensor | None:
        """bool [B, columns + T], which columns of the cache and of the pass are tokens; None if all are."""
        assert self.layer is not None
        held, tokens = self.layer.held, self.tokens
        before = None if held is None or tokens.fresh else held.real
        if before is None and tokens.real is None:
            return None
        device, (rows, length) = tokens.seq.device, tokens.shape
        whole = torch.ones(rows, columns + length, dtype=torch.bool, device=device)
        for part, real in ((whole[:, :columns], before), (whole[:, columns:], tokens.real)):
            if real is not None:
                part.copy_(real)
        return whole


@dataclass
class StepMemory:
    """In a longreach session: in the StateStore of the pass's cache, by slot; nowhere for a pass without one."""

    config: MKAConfig
    number: int
    step: Step
    turn: Turn | None = None

    def before(self, k: Tensor) -> FastMemory:
        config, step, heads, dim = self.config, self.step, k.shape[1], k.shape[2]
        if step.cache is None:
            units = -(-max(step.append.counts) // config.block)
            return FastMemory.empty(config, len(step.append.counts), units, heads, dim, k.dtype, k.device)
        state, append = self._state(), step.append
        key = "turn of FastMKA"
        if key not in step.layers.shared:
            step.layers.shared[key] = state.begin(append.slots, append.seq, append.pos)
        self.turn = step.layers.shared[key]
        units = -(-_room(step, self.number) // config.block)
        wide = accumulator(k.dtype)
        return FastMemory(
            *state.read(self.number, append.slots, append.host_slots, self.turn, heads, 2 * dim, units, wide)
        )

    def after(self, memory: FastMemory) -> None:
        append = self.step.append
        if self.turn is not None and memory.sums is not None:  # means are written already
            self._state().write_sums(self.number, append.slots, self.turn, append.counts, memory.sums)

    def _state(self) -> MixState:
        assert self.step.cache is not None
        store, starts = self.step.cache.states, self.step.append.starts
        if not store.has_model(MEANS) and any(starts or ()):
            raise InvalidInput(
                f"the cache holds {max(starts or ())} tokens of which this model keeps no state; start with an empty "
                f"one"
            )
        config, device = self.config, self.step.append.slots.device
        block = config.block if config.keeps_sums else None
        state = store.of_model(
            MEANS, lambda: MixState(store.slots, device, means=config.keeps_means, block=block, variant=config.variant)
        )
        assert isinstance(state, MixState)
        return state


def tokens_of(step: Step) -> Tokens:
    """The tokens of a pass of a session. `longest` counts those of the pass alone."""
    append = step.append
    fresh = step.cache is None or (append.starts is not None and not any(append.starts))
    return Tokens(append.seq, append.pos, append.counts, max(append.counts), step.shape, step.real, fresh)


def check_positions(step: Step, position_ids: Any) -> None:
    """Raise Unsupported where a prompt's tokens are rotated by other positions than those from 0 on.

    Once a pass. Decode steps of one token follow a prompt that was checked, and are not looked at: no device sync.
    """
    key = "positions of MKA"
    if step.static or not isinstance(position_ids, Tensor) or key in step.layers.shared:
        return
    step.layers.shared[key] = True
    if step.shape[1] == 1 and any(step.append.starts or ()):
        return
    given = position_ids.expand(step.shape)
    given = given.flatten() if step.real is None else given[step.real]
    if not torch.equal(given, step.append.pos.to(given)):
        raise Unsupported(
            "position_ids: recall by 'hash' and 'index' takes positions that begin at 0 in a session, got others; "
            "leave position_ids out (a mask of padding is enough), or call the model without a session"
        )


def _room(step: Step, layer: int) -> int:
    """Tokens that a sequence of the pass may have before its memory moves."""
    assert step.cache is not None
    layout, table = step.cache.kv.layouts[layer], step.append.at(layer).table
    return table.shape[1] * layout.pages.size + max(layout.dropped[slot] for slot in step.append.host_slots)
