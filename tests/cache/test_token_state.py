"""What is kept of tokens lies in the pages of their keys, found through the same table, wherever they move."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig, DecodeBuffers, KVCache, PerTokenState, StatelessOnTruncate
from longreach.errors import InvalidInput
from longreach.ops import KVView
from tests.cache.drive import HEADS, fill, random_kept, random_tokens

LAYOUTS = {
    "contiguous": CacheConfig(capacity=300),
    "contiguous, growing": CacheConfig(),
    "paged": CacheConfig("paged", capacity=300, page=7),
    "paged, growing": CacheConfig("paged", page=16),
    "paged, one page a token": CacheConfig("paged", page=1),
    "pool": CacheConfig("paged", page=16, pages=60),
}
layouts = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
pers = pytest.mark.parametrize("per", [1, 3, 16, 40])


class Sums(PerTokenState):
    """The sum of each unit's keys, channel by channel, and how many there are."""

    def __init__(self, kv: KVView, per: int):
        super().__init__(kv, per, sums=(kv.k.shape[3], torch.float64), counts=(None, torch.int32))

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        for s, unit in {(s, n // self.per) for s, n in zip(seq.tolist(), slot.tolist(), strict=True)}:
            where = torch.arange(unit * self.per, min((unit + 1) * self.per, int(kv.seq_lens[s])))
            page, offset = kv.locate(torch.full_like(where, s), where)
            at, place = self.locate(kv, torch.tensor([s]), torch.tensor([unit]))
            self["sums"][at[0], :, place[0]] = kv.k[page, :, offset].double().sum(0)
            self["counts"][at[0], :, place[0]] = len(where)

    def right(self, kv: KVView) -> bool:
        """Whether all units in use are what the keys say."""
        other = copy.deepcopy(self)
        other["sums"].fill_(torch.nan)
        other.kept(0, kv)
        used = ~other["sums"].isnan().any(-1)
        units = sum(-(-n // self.per) for n in kv.seq_lens.tolist())
        assert int(used.sum()) == units * kv.heads, "no two units share a place"
        same = torch.equal(self["sums"][used], other["sums"][used])
        return same and torch.equal(self["counts"][used], other["counts"][used])


class OneLayer(StatelessOnTruncate):
    """A cache's state that is the PerTokenState of layer 0, once there is one."""

    inner: Sums | None = None

    def kept(self, layer: int, view: KVView) -> None:
        if self.inner is not None:
            self.inner.kept(layer, view)

    @property
    def generation(self) -> int:
        return 0 if self.inner is None else self.inner.generation


def read(cache: KVCache, per: int, slots: list[int], counts: list[int]) -> KVView:
    """A pass of random tokens that the state takes note of; its view."""
    step = cache.begin(slots, counts)
    cache.append(0, step, *random_tokens(sum(counts)))
    view, state = cache.view(0, step), cache.state
    assert isinstance(state, OneLayer)
    if state.inner is None:
        state.inner = Sums(view, per)
    state.inner.ensure_capacity(view)
    state.inner.note(view, step.seq, step.at(0).slot)
    cache.commit(step)
    return view


def everything(cache: KVCache) -> KVView:
    slots = range(len(cache.lengths))
    step = cache.begin(slots, [0 for _ in slots])
    view = cache.view(0, step)
    cache.abort(step)
    return view


@pytest.mark.covering
@layouts
@pers
def test_units_are_right_through_growth_eviction_and_cuts(config: CacheConfig, per: int) -> None:
    state = OneLayer()
    cache = KVCache(1, 3, config, state=state)
    assert state.inner is None
    read(cache, per, [2, 0, 1], [20, 130, 1])
    assert state.inner is not None
    for slots, counts in (([1], [60]), ([0, 2], [1, 1]), ([1, 0], [90, 33]), ([2], [200])):
        view = read(cache, per, slots, counts)
        assert state.inner.units == -(-view.page // per)
        assert state.inner.right(everything(cache))
    cache.keep(
        0, [0, 1, 2], [random_kept(used, n) for used, n in zip(cache.slots_in_use(0), (50, 7, 100), strict=True)]
    )
    assert state.inner["sums"].shape[0] == everything(cache).k.shape[0] and state.inner.right(everything(cache))
    read(cache, per, [0, 1, 2], [3, 70, 1])
    assert state.inner.right(everything(cache))
    cache.reset([1])
    read(cache, per, [1], [13])
    assert state.inner.right(everything(cache))
    lengths = list(cache.lengths)
    read(cache, per, [2], [2 * per])
    cache.truncate([2], [lengths[2] - 1])
    read(cache, per, [2], [per])  # the cut unit is whole again, and the ones after it
    assert state.inner.right(everything(cache))


def test_shapes_bytes_and_generation() -> None:
    cache = KVCache(1, 3, CacheConfig("paged", page=10))
    fill(cache, [0], [3])
    view = everything(cache)
    state = Sums(view, 4)
    assert state.units == 3 and view.k.shape[0] == 78 and state.generation == 0
    assert state["sums"].shape == (78, HEADS, 3, 8) and state["counts"].shape == (78, HEADS, 3)
    assert state.nbytes == 78 * HEADS * 3 * (8 * 8 + 4)
    state.ensure_capacity(view)
    assert state.generation == 0
    state["sums"].fill_(2.0)
    fill(cache, [1], [900])
    state.ensure_capacity(everything(cache))
    assert state.generation == 1 and state["sums"].shape == (156, HEADS, 3, 8)
    assert bool((state["sums"][:78] == 2).all()) and bool(state["sums"][78:].isnan().all())


@pytest.mark.parametrize(("page", "per"), [(16, 4), (16, 16), (4, 16), (10, 4), (7, 3), (3, 7), (1, 5), (5, 1)])
def test_a_unit_lies_in_the_page_of_its_first_slot(page: int, per: int) -> None:
    k = torch.randn(20, HEADS, page, 8)
    table = torch.randperm(20).view(2, 10)
    view = KVView(k, k, torch.tensor([10 * page, 10 * page]), table)
    state, places = Sums(view, per), set()
    for seq in range(2):
        for unit in range(-(-10 * page // per)):
            at, place = state.locate(view, torch.tensor([seq]), torch.tensor([unit]))
            assert int(at) == int(table[seq, unit * per // page]) and 0 <= int(place) < state.units
            places.add((int(at), int(place)))
    assert len(places) == 2 * -(-10 * page // per)


def test_places_without_a_table_and_of_many_units_at_once() -> None:
    k = torch.randn(3, HEADS, 20, 8)
    state = Sums(KVView(k, k, torch.tensor([20, 5, 0])), 4)
    at, place = state.locate(
        KVView(k, k, torch.tensor([20, 5, 0])), torch.tensor([[0], [2]]), torch.arange(5).expand(2, 5)
    )
    assert at.tolist() == [[0] * 5, [2] * 5] and place.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_shared_pages_hold_what_both_sequences_read() -> None:
    """Two sequences with the same first two pages: noted for one, right for both."""
    k = torch.randn(8, HEADS, 4, 8)
    view = KVView(k, k, torch.tensor([12, 10]), torch.tensor([[3, 1, 6], [3, 1, 0]]))
    state = Sums(view, 2)
    state.note(view, torch.zeros(12, dtype=torch.int64), torch.arange(12))
    state.note(view, torch.ones(2, dtype=torch.int64), torch.arange(8, 10))
    for seq, units in ((0, 6), (1, 5)):
        for unit in range(units):
            at, place = state.locate(view, torch.tensor([seq]), torch.tensor([unit]))
            want = sum(k[int(view.block_table[seq, n // 4]), :, n % 4].double() for n in range(2 * unit, 2 * unit + 2))  # type: ignore[index]
            torch.testing.assert_close(state["sums"][at[0], :, place[0]], want)


def test_growth_makes_captured_passes_void() -> None:
    state = OneLayer()
    cache = KVCache(1, 1, state=state)
    read(cache, 1, [0], [200])
    buffers = DecodeBuffers(cache, [0], 1)
    read(cache, 1, [0], [1])
    assert buffers.valid
    state.inner = copy.deepcopy(state.inner)
    assert state.inner is not None
    state.inner.ensure_capacity(KVView(torch.randn(1, HEADS, 600, 8), torch.randn(1, HEADS, 600, 8), torch.tensor([4])))
    assert not buffers.valid


def test_memory_made_in_inference_mode_serves_outside() -> None:
    cache = KVCache(1, 1)
    fill(cache, [0], [4])
    with torch.inference_mode():
        state = Sums(everything(cache), 2)
        fill(cache, [0], [400])
        state.ensure_capacity(everything(cache))
    state["sums"][0] = 1.0
    assert not state["sums"].is_inference()


def test_options_that_make_no_sense_are_refused() -> None:
    k = torch.randn(1, HEADS, 4, 8)
    view = KVView(k, k, torch.tensor([4]))
    with pytest.raises(InvalidInput, match="expected slots a unit >= 1, got 0"):
        Sums(view, 0)

    class Nothing(PerTokenState):
        def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None: ...

    with pytest.raises(InvalidInput, match="expected at least one tensor to keep"):
        Nothing(view)
