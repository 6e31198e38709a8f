"""What is put into a cache comes out of it, and a call that fails leaves it as it was."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig, KVCache, StatelessOnTruncate
from longreach.errors import CapacityError, InvalidInput, Unsupported
from longreach.ops import Rows, Spans, attend
from tests.cache.drive import DIM, HEADS, Snapshot, fill, held, joined, random_tokens, same, write

LAYOUTS = {
    "contiguous": CacheConfig(capacity=400),
    "contiguous, growing": CacheConfig(),
    "paged": CacheConfig("paged", capacity=400, page=7),
    "paged, growing": CacheConfig("paged", page=16),
    "paged, one page a token": CacheConfig("paged", page=1),
    "pool": CacheConfig("paged", page=16, pages=60),
    "host": CacheConfig(capacity=400, host=True),
    "host, growing": CacheConfig(host=True),
}
layouts = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)


@layouts
def test_ragged_sequences_come_out_as_they_went_in(config: CacheConfig) -> None:
    cache = KVCache(2, 3, config)
    want = fill(cache, [0, 1, 2], [5, 270, 1])
    for slots, counts in (([2, 0], [1, 1]), ([1], [17]), ([1, 2, 0], [0, 40, 3]), ([0, 1, 2], [1, 1, 1])):
        for slot, more in fill(cache, slots, counts).items():
            want[slot] = joined(want[slot], more)
    assert cache.lengths == [10, 288, 43]
    assert all(same(held(cache, slot), want[slot]) for slot in range(3))


@layouts
def test_a_pass_sees_all_up_to_its_own_tokens(config: CacheConfig) -> None:
    cache = KVCache(1, 4, config)
    fill(cache, [3, 1], [9, 2])
    step = cache.begin([1, 3, 0], [2, 0, 1])
    assert step.slots.tolist() == [1, 3, 0] and step.seq.tolist() == [0, 0, 2]
    place = step.at(0)
    assert step.pos.tolist() == place.slot.tolist() == [2, 3, 0] and place.seq_lens.tolist() == [4, 9, 1]
    assert place.starts == step.starts == (2, 9, 0)
    write(cache, step)
    view = cache.view(0, step)
    assert view.sequences == 3 and view.capacity >= 9 and view.slot_pos is None
    for seq, length in enumerate((4, 9, 1)):
        slots = torch.arange(length)
        page, offset = view.locate(torch.full_like(slots, seq), slots)
        assert not view.k[page, :, offset].isnan().any() and not view.v[page, :, offset].isnan().any()


@layouts
def test_rows_of_a_batch_may_come_in_any_order(config: CacheConfig) -> None:
    """The same three sequences in other slots, given in another order: the same attention."""
    k, v = random_tokens(30)
    q = torch.randn(3, 2 * HEADS, DIM)
    parts = [slice(0, 4), slice(4, 23), slice(23, 30)]

    def outputs(slots: list[int], order: list[int]) -> Tensor:
        cache = KVCache(1, 5, config)
        fill(cache, [0, 1, 2, 3, 4], [3, 1, 4, 1, 5])  # other sequences were here before
        cache.reset([0, 1, 2, 3, 4])
        step = cache.begin([slots[s] for s in order], [parts[s].stop - parts[s].start for s in order])
        cache.append(0, step, torch.cat([k[parts[s]] for s in order]), torch.cat([v[parts[s]] for s in order]))
        rows = Rows(q[order], torch.arange(3), step.at(0).seq_lens - 1)
        out = attend(rows, cache.view(0, step), Spans.dense(), scale=0.3).out
        return out[torch.tensor(order).argsort()]

    want = outputs([0, 1, 2], [0, 1, 2])
    assert not want.isnan().any()
    assert torch.equal(outputs([4, 0, 2], [2, 0, 1]), want)
    assert torch.equal(outputs([1, 4, 3], [1, 2, 0]), want)


@layouts
def test_append_writes_to_its_own_places_only(config: CacheConfig) -> None:
    cache = KVCache(1, 3, config)
    fill(cache, [0, 1, 2], [20, 20, 20])
    step = cache.begin([1], [3])
    assert cache.memory[0] is not None
    before = [x.clone() for x in cache.memory[0]]
    ((k, v),) = write(cache, step)
    place = step.at(0)
    for x, old, new in zip(cache.memory[0], before, (k, v), strict=True):
        old[place.page, :, place.offset] = new
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)
    assert len(set(zip(place.page.tolist(), place.offset.tolist(), strict=True))) == 3


# growth


def test_contiguous_memory_starts_at_256_and_doubles() -> None:
    cache = KVCache(2, 2)
    want = fill(cache, [0, 1], [256, 10])
    assert cache.layouts[0].pages.size == 256
    for total, size in ((257, 512), (512, 512), (513, 1024), (3000, 4096)):
        more = fill(cache, [0], [total - cache.lengths[0]])
        want[0] = joined(want[0], more[0])
        assert cache.layouts[0].pages.size == size and all(
            x.shape[2] == size for pair in cache.memory for x in pair or ()
        )
    assert same(held(cache, 0), want[0]) and same(held(cache, 1), want[1])


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=10)])
def test_reserved_room_is_exact_at_first_and_taken_without_growing(config: CacheConfig) -> None:
    cache = KVCache(2, 2, config)
    cache.reserve([0, 1], [3, 700])
    assert cache.lengths == [0, 0] and cache.nbytes == 0
    want = fill(cache, [0, 1], [3, 650])
    size = 2 * 700 if config.kind == "contiguous" else 71 * 10
    assert cache.nbytes == 2 * 2 * size * HEADS * DIM * 4
    place, moved = [pair[0].data_ptr() for pair in cache.memory if pair], cache.generation
    want[1] = joined(want[1], fill(cache, [1], [50])[1])
    assert [pair[0].data_ptr() for pair in cache.memory if pair] == place
    cache.reserve([1], [1])  # past it, memory doubles as ever
    assert cache.generation == moved + 1 and cache.layouts[0].pages.size * cache.layouts[0].pages.total == 2 * size
    assert same(held(cache, 0), want[0]) and same(held(cache, 1), want[1])


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=10), CacheConfig(capacity=900)])
def test_memory_that_could_not_be_allocated_whole_is_given_back(config: CacheConfig) -> None:
    """Less can then be asked of the same cache. One that holds something keeps its memory."""
    cache, other = KVCache(2, 2, config), KVCache(2, 2, config)
    cache.reserve([0, 1], [900, 30])
    step = cache.begin([0, 1], [5, 5])
    cache.append(0, step, *random_tokens(10))  # and for layer 1 there is no memory left
    cache.abort(step)
    assert list(cache.memory) == [None, None] and cache.nbytes == 0
    want = fill(cache, [0, 1], [5, 5])
    fill(other, [0, 1], [5, 5])
    assert cache.nbytes == other.nbytes
    before = cache.nbytes
    cache.abort(cache.begin([0], [3]))
    assert cache.nbytes == before and same(held(cache, 0), want[0]) and same(held(cache, 1), want[1])


def test_the_pool_doubles() -> None:
    cache = KVCache(2, 2, CacheConfig("paged", page=128))
    want = fill(cache, [0, 1], [256, 129])
    assert cache.layouts[0].pages.total == 4
    want[1] = joined(want[1], fill(cache, [1], [200])[1])
    assert cache.layouts[0].pages.total == 8 and all(x.shape[0] == 8 for pair in cache.memory for x in pair or ())
    assert same(held(cache, 0), want[0]) and same(held(cache, 1), want[1])


@pytest.mark.parametrize(
    "config", [CacheConfig(capacity=300), CacheConfig("paged", 300, 16), CacheConfig("paged", None, 16, 38)]
)
def test_memory_of_a_given_size_is_allocated_once(config: CacheConfig) -> None:
    cache = KVCache(1, 2, config)
    fill(cache, [0], [1])
    assert cache.memory[0] is not None
    place = cache.memory[0][0].data_ptr()
    fill(cache, [0, 1], [299, 300])
    assert cache.memory[0][0].data_ptr() == place


def test_a_layer_that_comes_late_gets_the_size_of_the_others() -> None:
    cache = KVCache(2, 1)
    step = cache.begin([0], [300])
    k, v = random_tokens(300)
    cache.append(1, step, k, v)
    cache.append(0, step, v, k)
    cache.commit(step)
    assert same(held(cache, 0), [(v, k), (k, v)])


@pytest.mark.parametrize(
    ("config", "fits", "slots", "counts", "message"),
    [
        (CacheConfig(capacity=300), [8, 3], [0, 1], [292, 298], r"holds 300 tokens a sequence, 301 are needed"),
        (CacheConfig("paged", 300, 16), [8, 3], [1], [298], r"holds 300 tokens a sequence, 301 are needed"),
        (CacheConfig("paged", None, 4, 5), [8, 3], [1, 0], [5, 5], r"5 pages of 4 tokens, 3 in use, and 3 more"),
    ],
)
def test_too_much_is_refused_before_anything_is_written(
    config: CacheConfig, fits: list[int], slots: list[int], counts: list[int], message: str
) -> None:
    cache = KVCache(2, 2, config)
    want = fill(cache, [0, 1], fits)
    before = Snapshot(cache)
    with pytest.raises(CapacityError, match=message + r".*nothing was written\. Raise CacheConfig"):
        cache.begin(slots, counts)
    assert before.unchanged(cache)
    assert all(same(held(cache, slot), want[slot]) for slot in (0, 1))
    fill(cache, slots, [n - 1 for n in counts])  # exactly full
    with pytest.raises(CapacityError):
        cache.begin([slots[0]], [4])


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=16)], ids=["contiguous", "paged"])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 6])
def test_growth_that_runs_out_of_memory_loses_nothing(
    config: CacheConfig, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers before the failing one may be larger than they need be; all read the same, and growth can be retried."""
    cache = KVCache(3, 2, config)
    want = fill(cache, [0, 1], [200, 3])
    before, generation = copy.deepcopy((cache.lengths, cache.layouts.of_layer)), cache.generation
    small = [pair[0].shape for pair in cache.memory if pair]
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", failing(fails_at))
        with pytest.raises(torch.OutOfMemoryError):
            cache.begin([1, 0], [700, 1])
    assert before == (cache.lengths, cache.layouts.of_layer) and cache.generation > generation
    grown = [pair[0].shape != shape for pair, shape in zip(cache.memory, small, strict=True) if pair]
    assert grown == [layer < (fails_at - 1) // 2 for layer in range(3)]
    views = [cache.view(layer, cache.begin([0], [0])) for layer in range(3)]
    assert {view.k.shape for view in views} == {small[0]}, "all layers still look alike"
    assert all(same(held(cache, slot), want[slot]) for slot in (0, 1))
    more = fill(cache, [0], [1])  # fits without growth
    want[0] = joined(want[0], more[0])
    more = fill(cache, [1], [700])
    want[1] = joined(want[1], more[1])
    assert len({pair[0].shape for pair in cache.memory if pair}) == 1
    assert all(same(held(cache, slot), want[slot]) for slot in (0, 1))


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=16)], ids=["contiguous", "paged"])
def test_growth_holds_one_layer_twice_and_no_more(config: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(4, 1, config)
    want = fill(cache, [0], [250])
    allocate, alive, peak = torch.Tensor.new_empty, dict[int, int](), [0]
    for pair in cache.memory:
        for x in pair or ():
            alive[id(x)] = x.nbytes
            weakref.finalize(x, alive.pop, id(x))
    old = sum(alive.values())

    def new_empty(*args: Any) -> Tensor:
        x = allocate(*args)
        alive[id(x)] = x.nbytes
        weakref.finalize(x, alive.pop, id(x))
        peak[0] = max(peak[0], sum(alive.values()))
        return x

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", new_empty)
        want[0] = joined(want[0], fill(cache, [0], [10])[0])
    assert cache.nbytes == 2 * old and peak[0] <= cache.nbytes + old / 4, "one old layer beside the new ones"
    assert same(held(cache, 0), want[0])


def test_a_first_allocation_that_fails_leaves_no_half_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1, 1)
    step = cache.begin([0], [2])
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", failing(2))
        with pytest.raises(torch.OutOfMemoryError):
            cache.append(0, step, *random_tokens(2))
    assert list(cache.memory) == [None] and cache.nbytes == 0 and cache.lengths == [0]


def failing(at: int) -> Callable[..., Tensor]:
    """new_empty that runs out of memory at its call number `at`."""
    calls = 0
    allocate = torch.Tensor.new_empty

    def new_empty(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(*args)

    return new_empty


# cutting, emptying, failing


@layouts
def test_cut_sequences_go_on_from_where_they_end(config: CacheConfig) -> None:
    cache = KVCache(2, 3, config)
    want = fill(cache, [0, 1, 2], [40, 33, 7])
    cache.truncate([2, 0], [7, 18])
    assert cache.lengths == [18, 33, 7]
    want[0] = [(k[:18], v[:18]) for k, v in want[0]]
    more = fill(cache, [0, 1], [30, 1])
    assert same(held(cache, 0), joined(want[0], more[0])) and same(held(cache, 1), joined(want[1], more[1]))
    assert same(held(cache, 2), want[2])


@layouts
def test_an_emptied_slot_serves_another_sequence(config: CacheConfig) -> None:
    cache = KVCache(2, 3, config)
    want = fill(cache, [0, 1, 2], [40, 33, 7])
    cache.reset([1])
    assert cache.lengths == [40, 0, 7]
    new = fill(cache, [1], [5])
    assert same(held(cache, 1), new[1]) and same(held(cache, 0), want[0]) and same(held(cache, 2), want[2])


def test_pages_given_back_are_enough_for_others() -> None:
    cache = KVCache(1, 3, CacheConfig("paged", page=4, pages=6))
    fill(cache, [0, 1], [16, 8])
    cache.truncate([0], [9])
    fill(cache, [2], [4])
    cache.reset([1])
    fill(cache, [2], [8])
    with pytest.raises(CapacityError):
        cache.begin([2], [1])
    cache.reset([0, 1, 2])
    fill(cache, [1], [24])


@layouts
@pytest.mark.parametrize("end", ["abort", "forget"])
def test_a_failed_pass_never_was(config: CacheConfig, end: str) -> None:
    cache = KVCache(2, 2, config)
    want = fill(cache, [0, 1], [9, 20])
    used = [len(pages) for pages in cache.layouts[0].pages.held]
    step = cache.begin([1, 0], [30, 1])
    cache.append(0, step, *random_tokens(31))
    if end == "abort":
        cache.abort(step)
        assert cache.lengths == [9, 20] and [len(pages) for pages in cache.layouts[0].pages.held] == used
    more = fill(cache, [0, 1], [2, 2])
    assert cache.lengths == [11, 22]
    assert all(same(held(cache, slot), joined(want[slot], more[slot])) for slot in (0, 1))


def test_a_pool_filled_by_a_pass_that_failed_is_free_again() -> None:
    cache = KVCache(1, 2, CacheConfig("paged", page=4, pages=5))
    fill(cache, [0], [3])
    step = cache.begin([0], [17])
    with pytest.raises(CapacityError):
        cache.begin([1], [1])
    cache.abort(step)
    fill(cache, [1], [16])


@pytest.mark.parametrize(
    "end",
    [
        lambda cache, step: cache.commit(step),
        lambda cache, step: cache.abort(step),
        lambda cache, step: cache.truncate([1], [2]),
        lambda cache, step: cache.reset([0]),
        lambda cache, step: cache.begin([1], [1]),
    ],
    ids=["committed", "aborted", "cut", "emptied", "begun anew"],
)
def test_a_pass_that_is_over_cannot_write_or_count(end: Callable[..., None]) -> None:
    cache = KVCache(1, 2, CacheConfig("paged", page=4))
    fill(cache, [0, 1], [3, 3])
    step = cache.begin([0, 1], [2, 2])
    tokens = random_tokens(4)
    cache.append(0, step, *tokens)
    end(cache, step)
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match=r"this pass is over.*call begin again"):
        cache.commit(step)
    with pytest.raises(InvalidInput, match="this pass is over"):
        cache.append(0, step, *tokens)
    assert before.unchanged(cache)


def test_passes_over_different_slots_may_overlap() -> None:
    cache = KVCache(1, 3, CacheConfig("paged", page=4))
    one, two = cache.begin([0, 2], [5, 1]), cache.begin([1], [600])  # the pool grows in between
    (k, v), (a, b) = random_tokens(6), random_tokens(600)
    cache.append(0, two, a, b)
    cache.append(0, one, k, v)
    cache.commit(one)
    cache.abort(one)
    cache.commit(two)
    assert cache.lengths == [5, 600, 1]
    assert same(held(cache, 0), [(k[:5], v[:5])]) and same(held(cache, 1), [(a, b)])


# state


class Noted(StatelessOnTruncate):
    """A state that notes what it is told. `floor`: it cannot be cut to fewer tokens."""

    def __init__(self, floor: int = 0):
        self.log, self.floor = list[tuple[Any, ...]](), floor

    def reset(self, slots: Tensor) -> None:
        assert slots.dtype == torch.int64
        self.log.append(("reset", slots.tolist()))

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        if bool((lengths < self.floor).any()):
            raise Unsupported(f"this cannot be cut below {self.floor} tokens")

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        assert slots.dtype == lengths.dtype == torch.int64
        self.log.append(("truncate", slots.tolist(), lengths.tolist()))


def test_state_is_addressed_by_slot() -> None:
    state = Noted()
    cache, log = KVCache(1, 4, state=state), state.log
    fill(cache, [3, 1], [9, 4])
    cache.truncate([1, 3], [4, 5])  # slot 1 keeps all it has
    assert log == [("truncate", [3], [5])]
    log.clear()
    cache.reset([3])
    assert log == [("reset", [3])]
    log.clear()
    step = cache.begin([1, 0], [2, 2])
    cache.abort(step)
    cache.abort(step)
    assert log == [("truncate", [1, 0], [4, 0])]
    log.clear()
    cache.begin([1], [2])
    cache.begin([1], [2])  # the first of these was never committed
    assert log == [("truncate", [1], [4])]
    log.clear()
    cache.truncate([1], [4])  # no token less, but a pass is under way
    assert log == [("truncate", [1], [4])]
    log.clear()
    cache.truncate([1], [4])
    assert log == []


def test_a_cut_that_state_refuses_changes_nothing() -> None:
    state = Noted(floor=3)
    cache = KVCache(1, 2, CacheConfig("paged", page=2), state=state)
    want = fill(cache, [0, 1], [9, 4])
    before = Snapshot(cache)
    with pytest.raises(Unsupported, match="this cannot be cut below 3 tokens"):
        cache.truncate([1, 0], [3, 2])
    assert state.log == [] and before.unchanged(cache)
    assert same(held(cache, 0), want[0])


def test_a_pass_that_state_cannot_forget_is_reported_but_counts_for_nothing() -> None:
    state = Noted()
    cache = KVCache(1, 1, CacheConfig("paged", page=2), state=state)
    want = fill(cache, [0], [3])
    state.floor = 5
    step = cache.begin([0], [4])
    with pytest.raises(Unsupported):
        cache.abort(step)
    state.floor = 0
    assert cache.lengths == [3] and same(held(cache, 0), want[0])


def test_generation_counts_moves_of_state_too() -> None:
    class Moved(StatelessOnTruncate):
        generation = 5

    assert KVCache(1, 1, state=Moved()).generation == 5 and KVCache(1, 1).generation == 0
    assert StatelessOnTruncate().snapshot()() is None


# modes, dtypes, bad input


MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": nullcontext}


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=16)], ids=["contiguous", "paged"])
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_a_cache_filled_in_one_mode_serves_in_another(config: CacheConfig, first: str, second: str) -> None:
    cache = KVCache(1, 1, config)
    with MODES[first]():
        want = fill(cache, [0], [2])
        want[0] = joined(want[0], fill(cache, [0], [300])[0])  # allocates, and grows
    with MODES[second]():
        want[0] = joined(want[0], fill(cache, [0], [1])[0])
        want[0] = joined(want[0], fill(cache, [0], [600])[0])
    assert not any(x.is_inference() for pair in cache.memory for x in pair or ())
    assert same(held(cache, 0), want[0])


def test_no_gradient_is_kept() -> None:
    cache = KVCache(1, 1)
    k, v = (x.requires_grad_() for x in random_tokens(3))
    step = cache.begin([0], [3])
    cache.append(0, step, k, v)
    assert not any(x.requires_grad for x in cache.memory[0] or ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_bytes(dtype: torch.dtype) -> None:
    cache = KVCache(3, 2, CacheConfig(capacity=10))
    assert cache.nbytes == 0
    step = cache.begin([1], [4])
    for layer in (0, 2):
        cache.append(layer, step, *random_tokens(4, heads=3, dim=16, dtype=dtype))
    assert cache.nbytes == 2 * 2 * (2 * 3 * 10 * 16) * dtype.itemsize
    paged = KVCache(1, 2, CacheConfig("paged", page=4, pages=7))
    fill(paged, [0], [1])
    assert paged.nbytes == 2 * 7 * 4 * HEADS * DIM * 4


def test_a_pass_of_nothing() -> None:
    cache = KVCache(1, 2)
    fill(cache, [], [])
    fill(cache, [1], [0])
    assert cache.lengths == [0, 0] and held(cache, 1)[0][0].shape == (0, HEADS, DIM)


def good() -> Tensor:
    return torch.randn(2, HEADS, DIM)


BAD_TOKENS = {
    "k: expected float": [
        (torch.randn(3, HEADS, DIM), good()),
        (torch.randn(2, HEADS * DIM), good()),
        (torch.zeros(2, HEADS, DIM, dtype=torch.int64), good()),
        (None, good()),
    ],
    "v: expected float32": [
        (good(), torch.randn(2, HEADS, DIM + 8)),
        (good(), good().half()),
        (good(), None),
    ],
    "expected on cpu like the cache": [(good().to("meta"), good().to("meta")), (good(), good().to("meta"))],
    "layer 0 holds float32": [
        (good().half(), good().half()),
        (torch.randn(2, 1, DIM), torch.randn(2, 1, DIM)),
        (torch.randn(2, HEADS, DIM + 8), torch.randn(2, HEADS, DIM + 8)),
    ],
}


@pytest.mark.parametrize(("message", "k", "v"), [(m, k, v) for m, pairs in BAD_TOKENS.items() for k, v in pairs])
def test_tokens_that_do_not_fit_are_refused(message: str, k: Any, v: Any) -> None:
    cache = KVCache(1, 1)
    fill(cache, [0], [3])
    step = cache.begin([0], [2])
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match=message):
        cache.append(0, step, k, v)
    assert before.unchanged(cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.begin([0, 0], [1, 1]), "distinct slots"),
        (lambda c: c.begin([0], [1, 1]), "a number for each"),
        (lambda c: c.begin([2], [1]), r"slots in \[0, 2\)"),
        (lambda c: c.begin([-1], [1]), r"slots in \[0, 2\)"),
        (lambda c: c.begin([0], [-1]), r"ints >= 0 as numbers, got \[-1\]"),
        (lambda c: c.begin([0], [1.0]), r"ints >= 0 as numbers, got \[1.0\]"),
        (lambda c: c.begin([0], None), "a number for each, got None"),
        (lambda c: c.begin(["0"], [1]), r"a sequence of ints as slots, got \['0'\]"),
        (lambda c: c.truncate([0], [4]), "slot 0 holds 3 tokens, cannot keep 4"),
        (lambda c: c.truncate([0], [-1]), "ints >= 0"),
        (lambda c: c.truncate([0, 0], [1, 2]), "distinct slots"),
        (lambda c: c.truncate([0, 1], [1]), "a number for each"),
        (lambda c: c.truncate([-1], [1]), r"slots in \[0, 2\)"),
        (lambda c: c.reset([0, 0]), r"reset: expected distinct slots, got slots \[0, 0\]"),
        (lambda c: c.reset([2]), r"slots in \[0, 2\)"),
        (lambda c: c.reset([-1]), r"slots in \[0, 2\)"),
        (lambda c: c.view(1, c.begin([0], [0])), r"layer: expected an int in \[0, 1\), got 1"),
        (lambda c: c.append(-1, c.begin([0], [2]), good(), good()), r"layer: expected an int in \[0, 1\), got -1"),
        (lambda c: c.begin([True], [1]), r"a sequence of ints as slots, got \[True\]"),
        (lambda c: c.begin([0], [True]), r"ints >= 0 as numbers, got \[True\]"),
        (lambda c: KVCache(1, 1).view(0, KVCache(1, 1).begin([0], [0])), "holds no keys yet; append first"),
        (lambda c: KVCache(0, 1), "at least one layer and slot"),
        (lambda c: KVCache(1, 0), "at least one layer and slot"),
    ],
)
def test_calls_that_make_no_sense_are_refused(call: Callable[[KVCache], Any], message: str) -> None:
    cache = KVCache(1, 2)
    fill(cache, [0, 1], [3, 4])
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match=message):
        call(cache)
    assert before.unchanged(cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ring"}, "kind: expected 'contiguous' or 'paged', got 'ring'"),
        ({"capacity": 0}, "capacity: expected a count >= 1, got 0"),
        ({"capacity": True}, "capacity: expected a count >= 1, got True"),
        ({"capacity": 1.5}, "capacity: expected a count >= 1, got 1.5"),
        ({"kind": "paged", "page": 0}, "page: expected a count >= 1, got 0"),
        ({"kind": "paged", "page": None}, "page: expected a count >= 1, got None"),
        ({"kind": "paged", "pages": -3}, "pages: expected a count >= 1, got -3"),
        ({"pages": 3}, "only a paged cache has a pool"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CacheConfig(**options)


@pytest.mark.parametrize("rows", [None, 2], ids=["no rows", "some rows"])
def test_a_layer_that_lacks_keys_of_the_pass_is_not_committed(rows: int | None) -> None:
    cache = KVCache(3, 2)
    step = cache.begin([1, 0], [3, 2])
    k, v = torch.randn(2, 5, HEADS, DIM)
    for layer in (0, 2):
        cache.append(layer, step, k, v)
    if rows is not None:
        cache.append(1, step, k[:rows], v[:rows], rows=torch.arange(rows))
    with pytest.raises(
        InvalidInput, match=r"the pass's 5 new tokens appended to every layer, got fewer in layers \[1\]"
    ):
        cache.commit(step)
    assert cache.lengths == [0, 0]
    cache.append(1, step, k[rows or 0 :], v[rows or 0 :], rows=torch.arange(rows or 0, 5))
    cache.commit(step)
    assert cache.lengths == [2, 3]


def test_a_pass_of_overwritten_tokens_alone_needs_no_other_layer() -> None:
    cache = KVCache(2, 1)
    step = cache.begin([0], [4])
    for layer in range(2):
        cache.append(layer, step, *torch.randn(2, 4, HEADS, DIM))
    cache.commit(step)
    step = cache.place([0], [[1, 2]], overwrite=True)
    cache.append(0, step, *torch.randn(2, 2, HEADS, DIM))
    cache.commit(step)
    assert cache.lengths == [4]


@layouts
def test_runs_say_of_each_row_what_the_device_knows(config: CacheConfig) -> None:
    cache = KVCache(1, 3, config)
    for counts in ((5, 0, 9), (1, 4, 2)):
        step = cache.begin([2, 0, 1], counts)
        told = [(b, first + n) for rows, b, first in step.at(0).runs for n in range(rows)]
        assert told == list(zip(step.seq.tolist(), step.pos.tolist(), strict=True))
        write(cache, step)
        cache.commit(step)
