"""Any sequence of calls against a cache made of Python lists."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from longreach.cache import Append, CacheConfig, KVCache, PerTokenState, StatelessOnTruncate, kv
from longreach.errors import CapacityError, InvalidInput, Unsupported
from longreach.ops import KVView
from tests.cache.drive import DIM, HEADS, Snapshot, Tokens, held, joined, random_kept, same, split, taken, write
from tests.poison import nan_memory

SLOTS, LAYERS = 3, 2
configs = st.sampled_from(
    [
        CacheConfig(capacity=12),
        CacheConfig("paged", capacity=12, page=3),
        CacheConfig("paged", page=3, pages=7),
        CacheConfig("paged", page=1, pages=11, capacity=9),
        CacheConfig("paged", page=100),
        CacheConfig("paged", page=4),
        CacheConfig(),
        CacheConfig(host=True),
        CacheConfig(capacity=12, host=True),
    ]
)
some_slots = st.lists(st.sampled_from(range(SLOTS)), unique=True, min_size=1)
lengths = st.integers(0, 9)
ends = st.sampled_from(["commit", "commit", "leave open", "abort"])


class KeyCopies(PerTokenState):
    """A copy of each key: state of tokens."""

    def __init__(self, kv: KVView):
        super().__init__(kv, keys=(DIM, torch.float32))

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        page, offset = kv.locate(seq, slot)
        own, unit = self.locate(kv, seq, slot)
        self["keys"][own, :, unit] = kv.k[page, :, offset]

    def of(self, kv: KVView, seq: int) -> Tensor:
        """[n, G, D]: the copies of a sequence's keys."""
        slot = torch.arange(int(kv.seq_lens[seq]))
        own, unit = self.locate(kv, torch.full_like(slot, seq), slot)
        return self["keys"][own, :, unit]


class Follower(StatelessOnTruncate):
    """A state that follows the cache as methods' would. New rows are noted while their pass runs.

    tokens: how many each sequence has. rows: state of sequences, position -> number of the pass that noted the row.
    copies: state of tokens, layer by layer; new keys alone are noted, those that are overwritten must be followed.
    """

    def __init__(self) -> None:
        self.tokens = [0] * SLOTS
        self.rows: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self.copies: dict[int, KeyCopies] = {}

    def note(self, cache: KVCache, step: Append) -> None:
        assert step.starts is not None
        new = step.pos >= torch.tensor(step.starts, dtype=torch.int64)[step.seq]
        for layer in range(LAYERS):
            view = cache.view(layer, step)
            copies = self.copies.setdefault(layer, KeyCopies(view))
            copies.ensure_capacity(view)
            copies.note(view, step.seq[new], step.at(layer).slot[new])
        for slot, n in zip(step.host_slots, step.added, strict=True):
            self.tokens[slot] += n
        for seq, pos in zip(step.seq.tolist(), step.pos.tolist(), strict=True):
            self.rows[step.host_slots[seq]][pos] = step.number

    def reset(self, slots: Tensor) -> None:
        self.truncate(slots, torch.zeros_like(slots))

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        assert all(n <= self.tokens[s] for s, n in zip(slots.tolist(), lengths.tolist(), strict=True))

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        for slot, n in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.tokens[slot], self.rows[slot] = n, below(self.rows[slot], n)

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        for slot, n in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.rows[slot] = below(self.rows[slot], n)

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        self.copies[layer].written(layer, view, seq, slot)

    def kept(self, layer: int, view: KVView) -> None:
        self.copies[layer].kept(layer, view)


def below(rows: dict[int, int], length: int) -> dict[int, int]:
    return {pos: number for pos, number in rows.items() if pos < length}


@dataclass
class Pass:
    """step; slot -> what it wrote there; slot -> positions of its rows, where some overwrite."""

    step: Append
    tokens: dict[int, list[Tokens]]
    positions: dict[int, list[int]] = field(default_factory=dict)

    def first(self, slot: int, length: int) -> int:
        """What a sequence is cut to if the pass fails."""
        return min([length, *self.positions.get(slot, [])])


class AnySequenceOfCalls(RuleBasedStateMachine):
    @initialize(config=configs, resident=st.sampled_from([(), (1,)]))
    def start(self, config: CacheConfig, resident: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.staging_of_few_rows = patch.object(kv, "IN_PLACE", 2)
        self.staging_of_few_rows.start()
        self.state = Follower()
        with nan_memory():
            self.cache = KVCache(LAYERS, SLOTS, config, state=self.state, resident=resident)
            write(self.cache, self.cache.begin([0], [0]))  # memory is there from now on
        none = torch.empty(0, HEADS, DIM)
        self.empty: list[Tokens] = [(none, none)] * LAYERS
        self.sequences: list[list[Tokens]] = [self.empty] * SLOTS  # layers of other lengths after eviction
        self.lengths = [0] * SLOTS
        self.rows: list[dict[int, int]] = [{}] * SLOTS  # position -> the pass whose row a state of sequences holds
        self.evicted_at = [[0] * SLOTS for _ in range(LAYERS)]
        self.open: dict[int, Pass] = {}  # slot -> the pass that is under way on it
        self.passes: list[Pass] = []

    def pages(self, layer: int, slot: int) -> int:
        """Pages the slot must hold: for its tokens and those of a pass under way."""
        n = len(self.sequences[slot][layer][0])
        if slot in self.open:
            step = self.open[slot].step
            n += step.added[step.host_slots.index(slot)]
        return math.ceil(n / self.cache.config.page)

    def fits(self, slots: list[int], added: list[int]) -> bool:
        config = self.cache.config
        for layer in range(LAYERS):
            after = {s: len(self.sequences[s][layer][0]) + n for s, n in zip(slots, added, strict=True)}
            if config.capacity is not None and max(after.values()) > config.capacity:
                return False
            others = sum(self.pages(layer, s) for s in range(SLOTS) if s not in after)
            pages = others + sum(math.ceil(n / config.page) for n in after.values())
            if config.pages is not None and pages > config.pages:
                return False
        return True

    def cut(self, slot: int, length: int) -> None:
        """What is left of a sequence, and no pass on it any more."""
        gone = self.lengths[slot] - length
        self.sequences[slot] = [
            (k[: max(0, len(k) - gone)], v[: max(0, len(v) - gone)]) for k, v in self.sequences[slot]
        ]
        self.lengths[slot], self.rows[slot] = length, below(self.rows[slot], length)
        self.open.pop(slot, None)
        if length == 0:
            self.sequences[slot] = self.empty
            for each in self.evicted_at:
                each[slot] = 0

    def drop(self, slots: list[int]) -> None:
        """Passes under way on the slots have failed."""
        for slot in slots:
            if slot in self.open:
                self.cut(slot, self.open[slot].first(slot, self.lengths[slot]))

    @rule(slots=some_slots, data=st.data(), end=ends)
    def begin(self, slots: list[int], data: st.DataObject, end: str) -> None:
        counts = [data.draw(lengths) for _ in slots]
        self.drop(slots)
        if not self.fits(slots, counts):
            with pytest.raises(CapacityError):
                self.cache.begin(slots, counts)
            return
        with nan_memory():
            step = self.cache.begin(slots, counts)
        self.opened(Pass(step, split(step, write(self.cache, step))), end)

    @rule(slots=some_slots, data=st.data(), end=ends)
    def place(self, slots: list[int], data: st.DataObject, end: str) -> None:
        """Rows over what is there, and the next ones."""
        self.drop(slots)
        for slot in slots:  # as the cache does once it is called; here before positions are drawn
            self.cache.truncate([slot], [self.lengths[slot]])
        positions = {}
        for slot in slots:
            whole = not any(each[slot] for each in self.evicted_at)
            used = st.lists(st.integers(0, self.lengths[slot] - 1), unique=True) if self.lengths[slot] else st.just([])
            old = sorted(data.draw(used)) if whole else []
            positions[slot] = [*old, *range(self.lengths[slot], self.lengths[slot] + data.draw(lengths))]
        added = [sum(p >= self.lengths[slot] for p in positions[slot]) for slot in slots]
        if not self.fits(slots, added):
            with pytest.raises(CapacityError):
                self.cache.place(slots, list(positions.values()), overwrite=True)
            return
        with nan_memory():
            step = self.cache.place(slots, list(positions.values()), overwrite=True)
        assert list(step.added) == added and step.pos.tolist() == [p for each in positions.values() for p in each]
        self.opened(Pass(step, split(step, write(self.cache, step)), positions), end)

    def opened(self, done: Pass, end: str) -> None:
        self.state.note(self.cache, done.step)
        for slot, tokens in done.tokens.items():  # rows behind the first overwritten token attended to old keys
            new = range(self.lengths[slot], self.lengths[slot] + len(tokens[0][0]))
            noted = dict.fromkeys(done.positions.get(slot, new), done.step.number)
            self.rows[slot] = below(self.rows[slot], done.first(slot, self.lengths[slot])) | noted
        self.passes.append(done)
        self.open.update(dict.fromkeys(done.step.host_slots, done))
        if end != "leave open":
            self.ended(done, end == "commit")

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, commit: bool) -> None:
        self.ended(data.draw(st.sampled_from(self.passes)), commit)

    def ended(self, ended: Pass, commit: bool) -> None:
        slots = ended.step.host_slots
        mine = [s for s in slots if self.open.get(s) is ended]
        if not commit:
            self.cache.abort(ended.step)
            self.drop(mine)
        elif mine == list(slots):
            self.cache.commit(ended.step)
            for slot in slots:
                self.written(slot, ended)
        else:
            before = Snapshot(self.cache)
            with pytest.raises(InvalidInput):
                self.cache.commit(ended.step)
            assert before.unchanged(self.cache)

    def written(self, slot: int, done: Pass) -> None:
        old, new = self.sequences[slot], done.tokens[slot]
        over = [p for p in done.positions.get(slot, []) if p < self.lengths[slot]]
        changed = [tuple(x.index_put((torch.tensor(over, dtype=torch.int64),), y[: len(over)])
                         for x, y in zip(a, b, strict=True)) for a, b in zip(old, new, strict=True)]  # fmt: skip
        self.sequences[slot] = joined(changed, [(k[len(over) :], v[len(over) :]) for k, v in new])  # type: ignore[arg-type]
        self.lengths[slot] += len(new[0][0]) - len(over)
        del self.open[slot]

    def teardown(self) -> None:
        self.staging_of_few_rows.stop()

    @precondition(lambda self: any(self.lengths) and not self.cache.config.host)
    @rule(layers=st.lists(st.sampled_from(range(LAYERS)), unique=True, min_size=1), data=st.data(), wait=st.booleans())
    def keep(self, layers: list[int], data: st.DataObject, wait: bool) -> None:
        filled = [s for s in range(SLOTS) if self.lengths[s]]
        slots = data.draw(st.lists(st.sampled_from(filled), unique=True, min_size=1))
        for done in self.passes if wait else []:
            self.ended(done, commit=False)
        slots = [s for s in slots if self.lengths[s]]
        counts = {s: data.draw(st.integers(1, 9)) for s in slots}
        for layer in layers:
            used = {s: len(self.sequences[s][layer][0]) for s in slots}
            index = {s: random_kept(used[s], min(counts[s], used[s])) for s in slots}
            if self.open:
                before = Snapshot(self.cache)
                with pytest.raises(InvalidInput):
                    self.cache.keep(layer, list(index), list(index.values()))
                assert before.unchanged(self.cache)
                return
            with nan_memory():
                self.cache.keep(layer, list(index), list(index.values()))
            for slot, i in index.items():
                if i.shape[1] < used[slot]:
                    self.sequences[slot][layer] = taken(self.sequences[slot][layer], i)
                    self.evicted_at[layer][slot] = self.lengths[slot]

    @rule(slots=some_slots, data=st.data())
    def truncate(self, slots: list[int], data: st.DataObject) -> None:
        intact = {s: self.open[s].first(s, self.lengths[s]) if s in self.open else self.lengths[s] for s in slots}
        ends = {s: intact[s] - data.draw(st.integers(0, intact[s])) for s in slots}
        if any(0 < n < each[s] for s, n in ends.items() for each in self.evicted_at):
            before = Snapshot(self.cache)
            with pytest.raises(Unsupported):
                self.cache.truncate(slots, list(ends.values()))
            assert before.unchanged(self.cache)
            return
        self.cache.truncate(slots, list(ends.values()))
        for slot, n in ends.items():
            self.cut(slot, n)

    @precondition(lambda self: any(self.lengths) or self.open)
    @rule(slots=some_slots)
    def reset(self, slots: list[int]) -> None:
        self.cache.reset(slots)
        for slot in slots:
            self.cut(slot, 0)

    @invariant()
    def tokens_are_where_they_were_put(self) -> None:
        if not all(self.cache.memory):  # all was emptied after eviction
            assert not any(self.lengths) and not any(self.cache.memory)
            return
        for slot in range(SLOTS):
            assert self.cache.lengths[slot] == self.lengths[slot]
            if slot not in self.open:
                assert self.state.tokens[slot] == self.lengths[slot]
                assert same(held(self.cache, slot), self.sequences[slot])

    @invariant()
    def state_is_that_of_the_keys(self) -> None:
        for slot in range(SLOTS):
            if slot not in self.open:
                assert self.state.rows[slot] == self.rows[slot]
        for layer, copies in self.state.copies.items() if all(self.cache.memory) else ():
            view = self.cache.view_of_all(layer)
            for slot in range(SLOTS):
                if slot not in self.open:
                    assert torch.equal(copies.of(view, slot), self.sequences[slot][layer][0])

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        for layer, pair in enumerate(self.cache.memory):
            layout = self.cache.layouts[layer]
            pages = layout.pages
            in_use = [page for slot in pages.held for page in slot]
            assert sorted(in_use + pages.free) == list(range(pages.total))
            assert pair is None or pair[0].shape[::2] == pair[1].shape[::2] == (pages.total, pages.size)
            assert layout.evicted_at == self.evicted_at[layer]
            assert self.cache.slots_in_use(layer) == [len(self.sequences[s][layer][0]) for s in range(SLOTS)]
            if not pages.contiguous:
                assert [len(slot) for slot in pages.held] == [self.pages(layer, slot) for slot in range(SLOTS)]


TestAnySequenceOfCalls = AnySequenceOfCalls.TestCase
TestAnySequenceOfCalls.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
