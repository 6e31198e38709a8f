"""Any sequence of calls against a cache made of Python lists."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from longreach.cache import Append, CacheConfig, KVCache
from longreach.errors import CapacityError, InvalidInput
from tests.cache.drive import Snapshot, Tokens, held, joined, same, split, write
from tests.poison import nan_memory

SLOTS, LAYERS = 3, 2
configs = st.sampled_from(
    [
        CacheConfig(capacity=12),
        CacheConfig("paged", capacity=12, page=3),
        CacheConfig("paged", page=3, pages=7),
        CacheConfig("paged", page=1, pages=11, capacity=9),
        CacheConfig("paged", page=100),
    ]
)
some_slots = st.lists(st.sampled_from(range(SLOTS)), unique=True, min_size=1)
lengths = st.integers(0, 9)


class Counter:
    """A state that follows the cache as a method's would: it notes tokens while a pass runs."""

    def __init__(self) -> None:
        self.tokens = [0] * SLOTS

    def note(self, step: Append) -> None:
        for slot, n in zip(step.host_slots, step.counts, strict=True):
            self.tokens[slot] += n

    def reset(self, slots: Tensor) -> None:
        for slot in slots.tolist():
            self.tokens[slot] = 0

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        assert all(n <= self.tokens[s] for s, n in zip(slots.tolist(), lengths.tolist(), strict=True))

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        for slot, n in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.tokens[slot] = n


@dataclass
class Pass:
    step: Append
    tokens: dict[int, list[Tokens]]


class AnySequenceOfCalls(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config: CacheConfig) -> None:
        torch.manual_seed(0)
        with nan_memory():
            self.cache = KVCache(LAYERS, SLOTS, config)
            write(self.cache, self.cache.begin([0], [0]))  # memory is there from now on
        self.state = self.cache.state["counter"] = Counter()
        self.sequences: list[list[Tokens] | None] = [None] * SLOTS
        self.open: dict[int, Pass] = {}  # slot -> the pass that is under way on it
        self.passes: list[Pass] = []

    def length(self, slot: int) -> int:
        sequence = self.sequences[slot]
        return 0 if sequence is None else sequence[0][0].shape[0]

    def pages(self, slot: int) -> int:
        """Pages the slot must hold: for its tokens and those of a pass under way."""
        n = self.length(slot)
        if slot in self.open:
            step = self.open[slot].step
            n += step.counts[step.host_slots.index(slot)]
        return math.ceil(n / self.cache.config.page)

    def fits(self, slots: list[int], counts: list[int]) -> bool:
        config = self.cache.config
        after = {s: self.length(s) + n for s, n in zip(slots, counts, strict=True)}
        if config.capacity is not None and max(after.values()) > config.capacity:
            return False
        others = sum(self.pages(s) for s in range(SLOTS) if s not in after)
        return config.pages is None or others + sum(math.ceil(n / config.page) for n in after.values()) <= config.pages

    @rule(slots=some_slots, data=st.data())
    def begin(self, slots: list[int], data: st.DataObject) -> None:
        counts = [data.draw(lengths) for _ in slots]
        for slot in slots:
            self.open.pop(slot, None)
        if not self.fits(slots, counts):
            with pytest.raises(CapacityError):
                self.cache.begin(slots, counts)
            return
        with nan_memory():
            step = self.cache.begin(slots, counts)
        self.state.note(step)
        done = Pass(step, split(step, write(self.cache, step)))
        self.passes.append(done)
        self.open.update(dict.fromkeys(slots, done))

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, commit: bool) -> None:
        ended = data.draw(st.sampled_from(self.passes))
        slots = ended.step.host_slots
        mine = [s for s in slots if self.open.get(s) is ended]
        if not commit:
            self.cache.abort(ended.step)
        elif mine == list(slots):
            self.cache.commit(ended.step)
            for slot in slots:
                old = self.sequences[slot]
                self.sequences[slot] = joined(old, ended.tokens[slot]) if old else ended.tokens[slot]
        else:
            before = Snapshot(self.cache)
            with pytest.raises(InvalidInput):
                self.cache.commit(ended.step)
            assert before.unchanged(self.cache)
            return
        for slot in mine:
            del self.open[slot]

    @rule(slots=some_slots, data=st.data())
    def truncate(self, slots: list[int], data: st.DataObject) -> None:
        ends = [data.draw(st.integers(0, self.length(s))) for s in slots]
        self.cache.truncate(slots, ends)
        for slot, n in zip(slots, ends, strict=True):
            self.open.pop(slot, None)
            sequence = self.sequences[slot]
            self.sequences[slot] = sequence and [(k[:n], v[:n]) for k, v in sequence]

    @rule(slots=some_slots)
    def reset(self, slots: list[int]) -> None:
        self.cache.reset(slots)
        for slot in slots:
            self.open.pop(slot, None)
            self.sequences[slot] = None

    @invariant()
    def tokens_are_where_they_were_put(self) -> None:
        for slot in range(SLOTS):
            assert self.cache.lengths[slot] == self.length(slot)
            if slot not in self.open:
                assert self.state.tokens[slot] == self.length(slot)
                found, sequence = held(self.cache, slot), self.sequences[slot]
                assert found[0][0].shape[0] == self.length(slot)
                assert sequence is None or same(found, sequence)

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        pages = self.cache.pages
        in_use = [page for slot in pages.held for page in slot]
        assert sorted(in_use + pages.free) == list(range(pages.total))
        if not pages.contiguous:
            assert [len(slot) for slot in pages.held] == [self.pages(slot) for slot in range(SLOTS)]


TestAnySequenceOfCalls = AnySequenceOfCalls.TestCase
TestAnySequenceOfCalls.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
