"""MAC's step over a case's inputs, with forced hits: the match finds queries planted in the ring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.bench.case import Hits, Memory
from longreach.bench.inputs import Inputs
from longreach.bench.mac.resting import resting_share
from longreach.bench.timing import Call
from longreach.methods.base import Outcome, PromptObserver, attend_densely
from longreach.methods.call import LayerCall
from longreach.methods.mac import MAC
from longreach.methods.mac.state import LayerState
from longreach.ops import Partial, RotaryAngles, Span, Spans, absolute, angles, relative
from longreach.ops.append import append
from longreach.ops.match import recovered
from longreach.runtime import Ledger, Pass, Segment, drive

THETA = 5e5  # rotary base
APART = 3.0  # standard deviation of queries that are not to match; those of rows have 1


class ForcedHits:
    """A layer for each copy of a case's inputs. The rows before the newest are in its ring, their queries far from the
    newest one's; if a head is to hit, the row `gap` back has exactly its present query.

    An entry's weight is about that of the keys read with it, so that an error in either shows. hit: bool [B, H] of
    each copy; rests: bool [B, G]; reuse: bool [B, G], where an entry is taken: all heads hit, and do not rest.
    """

    def __init__(self, inputs: Inputs, hits: Hits, impl: str, seed: int):
        shape, reuse = inputs.shape, inputs.case.reuse
        assert reuse is not None
        self.inputs, self.hits = inputs, hits
        self.gap, self.band = hits.span(shape, reuse.window)
        guard = MAC.rest_rows if hits.guard else None
        self.method = MAC(window=reuse.window, band=self.band, min_context=0, rest_rows=guard)
        self.turn = _turn(inputs)
        slots = torch.arange(shape.batch, device=inputs.device)
        self.calls = [
            LayerCall(0, inputs.rows(copy, 1), inputs.view(copy, Memory()), slots, inputs.scale, impl=impl,
                      rotary=lambda: self.turn)
            for copy in range(inputs.copies)
        ]  # fmt: skip
        states = [self.method.new_state(call, shape.batch) for call in self.calls]
        self.states = [state for state in states if isinstance(state, LayerState)]  # without a plan all are
        group = shape.heads // shape.kv_heads
        self.resting = resting_share(self.states[0].rule, hits.rate, group, shape.context, self.gap)
        draw = torch.Generator(inputs.device).manual_seed(seed + 1)
        planted = [self._plant(call, state, draw) for call, state in zip(self.calls, self.states, strict=True)]
        self.hit, self.rests = [hit for hit, _ in planted], [rests for _, rests in planted]
        self.reuse = [h.unflatten(1, (-1, group)).all(2) & ~r for h, r in planted]

    def _plant(self, call: LayerCall, state: LayerState, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        shape, ring, entries = self.inputs.shape, state.ring, state.entries
        newest, keys = shape.context - 1, self.gap + self.band
        before = torch.arange(newest - ring.size, newest, device=draw.device)
        ring.stamp[:, before % ring.size] = before.int()
        ring.query.normal_(0, APART, generator=draw)
        entries.out.normal_(0, math.sqrt(math.e / keys), generator=draw)  # as attention over `keys` normal keys
        entries.lse.normal_(math.log(keys) + 0.5, 0.1, generator=draw)
        hit = torch.rand(shape.batch, shape.heads, generator=draw, device=draw.device) < self.hits.rate
        if self.hits.misses != "none" and not self.hits.spread:
            some = slice(None) if self.hits.misses == "each" else shape.batch // 2
            hit[some, shape.heads // 2 + 1] = False
        rests = torch.rand(shape.batch, shape.kv_heads, generator=draw, device=draw.device) < self.resting
        if self.hits.guard and self.hits.rate == 0:
            rests[:] = True  # between two searches
        ring.credit[:] = torch.where(rests, float(-state.rule.rest), math.inf)[..., None]
        mine = recovered(call.rows.q, self.turn, state.weight, ring.query.dtype)
        found = self.place(state)
        ring.query[:, :, found] = torch.where(hit[..., None], mine, ring.query[:, :, found])
        return hit, rests

    def place(self, state: LayerState) -> int:
        """Place in the ring of the row that hits find."""
        return (self.inputs.shape.context - 1 - self.gap) % state.ring.size

    def run(self, copy: int, ledger: Ledger | None = None) -> tuple[LayerCall, Outcome]:
        """The method's step over a copy, counted by the ledger if there is one."""
        step = Pass((Segment("decode", self.method),), states=CopyState(self.states[copy]), ledger=ledger)
        (done,) = drive(step, [self.calls[copy].observer()])
        return done

    def step(self, copy: int) -> Callable[[], tuple[LayerCall, Outcome]]:
        """The whole step: the row's key and value are appended, then all that the method does."""
        put = self.append(copy)

        def call() -> tuple[LayerCall, Outcome]:
            put()
            return self.run(copy)

        return call

    def dense(self, copy: int) -> Callable[[], Outcome]:
        """The same with dense attention, the library's own."""
        put = self.append(copy)

        def call() -> Outcome:
            put()
            return attend_densely(self.calls[copy].observer())

        return call

    def append(self, copy: int) -> Call:
        kv = self.calls[copy].kv
        page = torch.arange(kv.k.shape[0], device=kv.k.device)
        offset = torch.full_like(page, self.inputs.shape.context - 1)
        k, v = (x[:, :, -1].contiguous() for x in (kv.k, kv.v))  # what is there already: nothing changes
        return lambda: append(kv.k, kv.v, k, v, page, offset)

    def match(self, copy: int) -> Call:
        """Recovery, match, decision and ring alone."""
        call, state = self.calls[copy], self.states[copy]
        return lambda: call.observer().op("match", state.ring, state.rule, weight=state.weight)

    def attention(self, copy: int) -> Call:
        """The part after the match: attention, merged with the entries, and their update."""
        call, state = self.calls[copy], self.states[copy]
        found = call.op("match", state.ring, state.rule, weight=state.weight)
        spans = Spans((Span(absolute(found.start), relative(1)),), "query")

        def attend() -> tuple[Partial, Tensor]:
            split = relative(1 - self.band)
            return call.observer().op("attend_amend", spans, split, state.entries, found.read_entry, found.write_entry)

        return attend

    def timed(self) -> list[Call]:
        """The calls that the hits' entry is about, one a copy."""
        make = self.step if self.hits.part == "step" else self.attention
        return [make(copy) for copy in range(self.inputs.copies)]

    def described(self) -> dict[str, Any]:
        """The forced hits, for the record."""
        hit, reuse, rests = (float(torch.stack(x).float().mean()) for x in (self.hit, self.reuse, self.rests))
        told = {"gap": self.gap, "band": self.band, "heads_that_hit": hit, "kv_heads_that_reuse": reuse}
        return {**told, "kv_heads_that_rest": rests, "resting_in_the_long_run": self.resting}


@dataclass(frozen=True)
class CopyState:
    """The state of the one layer of a copy."""

    state: LayerState

    def get(self, method: PromptObserver, call: LayerCall) -> LayerState:
        return self.state


def _turn(inputs: Inputs) -> RotaryAngles:
    pos = inputs.rows(0, 1).pos
    inv_freq = THETA ** -(torch.arange(inputs.shape.dim // 2, device=inputs.device) / (inputs.shape.dim // 2))
    cos, sin = angles(pos, inv_freq)
    return RotaryAngles(cos.to(inputs.dtype), sin.to(inputs.dtype), "half")
