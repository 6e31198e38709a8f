"""MagicPIG's step over a case's inputs: a pass over the layers, the same with a block that is sealed, and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from longreach.bench.case import Memory, Preset
from longreach.bench.check import WrongResult, bound
from longreach.bench.inputs import Inputs
from longreach.bench.magicpig.lists import sampled_lists
from longreach.bench.timing import Call
from longreach.methods.base import Outcome, PromptObserver, attend_densely, budget
from longreach.methods.call import LayerCall
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.state import LayerTables
from longreach.ops import Lists, Rows
from longreach.ops.append import append
from longreach.ops.simhash import SampledAttention, attend_sampled
from longreach.runtime import LayerReport, Ledger, Pass, Segment, attend_layer, drive

DENSE = "dense"
ONE_BLOCK, NO_BLOCK = "a block is sealed", "no block is sealed"
PARTS = ("append", "sample and attend", "seal nothing", "seal a block")


@dataclass(frozen=True)
class Attended:
    """A layer's call and outcome, and the keys and weights that codes, look-ups and weights alone give for it."""

    call: LayerCall
    outcome: Outcome
    lists: Lists


class SampledLayers:
    """A layer for each copy of a case's inputs, with tables that hold the prompt; a pass visits the copies in turns.

    The rows of all copies share positions, so what a pass computes once for all of its layers is computed once here.
    states: of each copy. Sealing in any order and any number of times gives the same tables.
    """

    def __init__(self, inputs: Inputs, preset: Preset, impl: str):
        sampling = inputs.case.sampling
        assert sampling is not None
        self.inputs, self.preset, self.impl, self.count = inputs, preset, impl, sampling.layers
        self.method = MagicPIG(**asdict(preset), dense_layers=())
        first, last = inputs.rows(0, 1), inputs.shape.context - 1
        self._rows = [replace(first, q=inputs.q(copy, 1)) for copy in range(inputs.copies)]
        self._prompt = Rows(first.q, first.seq, first.pos - 1)
        self._views = [inputs.view(copy, Memory()) for copy in range(inputs.copies)]
        self._slots = torch.arange(inputs.shape.batch, device=inputs.device)
        stops = self.method.schedule.stops(torch.tensor([last]), range(inputs.copies))  # before the row's own token
        self.stops = [int(stop) for stop in stops]  # of the tables of each copy
        self._copies = [self._made(copy) for copy in range(inputs.copies)]
        self.states = [state for state, _ in self._copies]

    def _made(self, copy: int) -> tuple[LayerTables, LayerCall]:
        call = LayerCall(copy, self._prompt, self._views[copy], self._slots, self.inputs.scale, impl=self.impl,
                         phase="prefill")  # fmt: skip
        state = self.method.new_state(call, self.inputs.shape.batch)
        assert isinstance(state, LayerTables)
        self.method.observe_prompt(call, state)
        return state, call

    def get(self, method: PromptObserver, call: LayerCall) -> LayerTables:
        """The state of a layer of a pass."""
        return self.states[call.layer % len(self.states)]

    def call(self, layer: int) -> LayerCall:
        copy = layer % self.inputs.copies
        return LayerCall(layer, self._rows[copy], self._views[copy], self._slots, self.inputs.scale, impl=self.impl)

    def one(self) -> Attended:
        """The method's step in the first layer, uncaptured."""
        call, state, method, impl = self.call(0), self.states[0], self.method, self.impl
        outcome = method.run(call, state)
        return Attended(call, outcome, sampled_lists(call, method, state, impl))

    def reports(self, *, sealing: bool = False) -> tuple[LayerReport, ...]:
        """The method's report, of one layer for each copy. sealing: as in `step`."""
        ledger = Ledger()

        def calls() -> Iterator[LayerCall]:
            for copy in range(self.inputs.copies):
                if sealing:
                    self._unseal(copy)
                yield self.call(copy)

        drive(Pass((Segment("decode", self.method),), states=self, ledger=ledger), calls())
        return ledger.report().layers

    def step(self, *, sealing: bool = False) -> Call:
        """A pass over all layers: in each the row's key and value are appended, then the method runs.

        sealing: in each layer, a block of keys enters the tables of every sequence.
        """
        puts = [self.append(copy) for copy in range(self.inputs.copies)]

        def run() -> None:
            p = Pass((Segment("decode", self.method),), states=self)
            for layer in range(self.count):  # outcomes are dropped layer by layer, as a model drops them
                puts[layer % len(puts)]()
                if sealing:
                    self._unseal(layer % len(puts))
                attend_layer(p, replace(self.call(layer), shared=p.shared))

        return run

    def dense(self) -> Call:
        """The same pass with the library's dense attention."""
        puts = [self.append(copy) for copy in range(self.inputs.copies)]

        def run() -> None:
            for layer in range(self.count):
                puts[layer % len(puts)]()
                attend_densely(self.call(layer))

        return run

    def _unseal(self, copy: int) -> None:
        self.states[copy].tables.stop.fill_(max(self.stops[copy] - self.preset.seal, self.method.sinks))

    def append(self, copy: int) -> Call:
        kv = self._views[copy]
        page = torch.arange(kv.k.shape[0], device=kv.k.device)
        offset = torch.full_like(page, self.inputs.shape.context - 1)
        k, v = (x[:, :, -1].contiguous() for x in (kv.k, kv.v))  # what is there already: nothing changes
        return lambda: append(kv.k, kv.v, k, v, page, offset)

    def build(self) -> Call:
        """The tables of the first sequence's prompt in one layer, from its last prefill pass."""
        state, call = self._copies[0]
        first = state.tables.stop[:1]

        def run() -> None:
            first.fill_(self.method.sinks)
            self.method.observe_prompt(call.observer(), state)

        return run

    def parts(self) -> dict[str, list[Call]]:
        """Each part of the step alone, a call a copy, from the results of the parts before it.

        The rest of a step is the counting of reads, and the limits of lists. Raises WrongResult where parts differ from
        the method.
        """
        found: dict[str, list[Call]] = {name: [] for name in PARTS}
        for copy in range(self.inputs.copies):
            for name, call in self._parts_of(copy):
                found[name].append(call)
        return found

    def _parts_of(self, copy: int) -> Iterator[tuple[str, Call]]:
        call, state, method = self.call(copy), self.states[copy], self.method
        out, limit, tokens = (
            method.run(call, state).partial.out,
            budget(method.capacity, call.context),
            call.rows.pos.long(),
        )

        def whole() -> SampledAttention:
            return attend_sampled(
                call.rows, call.kv, self._slots, state.tables, state.projections, state.centre, limit,
                least=method.least, share=method.share, sinks=method.sinks, floor=method.floor, scale=call.scale,
                impl=self.impl,
            )  # fmt: skip

        off = (whole().partial.out.double() - out.double()).norm(dim=-1) / out.double().norm(dim=-1)
        if not float(off.max()) <= bound(out.dtype):
            raise WrongResult(
                f"{self.preset.name}: parts differ from the step by {float(off.max()):.1e}; their times do not count"
            )

        def seal() -> None:
            state.follow(call.observer(), tokens, step=True)

        def seal_block() -> None:
            self._unseal(copy)
            seal()

        yield "append", self.append(copy)
        yield "sample and attend", whole
        yield "seal nothing", seal
        yield "seal a block", seal_block
