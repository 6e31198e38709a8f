"""Eviction: each head keeps other keys, in the order of their positions; memory shrinks; all else goes on."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig, KVCache, StatelessOnTruncate
from longreach.errors import CapacityError, InvalidInput, Unsupported
from longreach.ops import KVView, Rows, Spans, attend
from tests.cache.drive import DIM, HEADS, Snapshot, Tokens, fill, held, joined, random_kept, same, taken, write

LAYOUTS = {
    "contiguous": CacheConfig(capacity=400),
    "contiguous, growing": CacheConfig(),
    "paged": CacheConfig("paged", capacity=400, page=7),
    "paged, growing": CacheConfig("paged", page=16),
    "paged, one page a token": CacheConfig("paged", page=1),
    "pool": CacheConfig("paged", page=16, pages=60),
}
layouts = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
Held = dict[int, list[Tokens]]


def evict(cache: KVCache, want: Held, layer: int, counts: dict[int, int], room: int = 0) -> None:
    """Keep random slots, as many as counts say, in the cache and in what it should hold."""
    used = cache.slots_in_use(layer)
    index = {slot: random_kept(used[slot], n) for slot, n in counts.items()}
    cache.keep(layer, list(index), list(index.values()), room)
    for slot, i in index.items():
        want[slot][layer] = taken(want[slot][layer], i)


def more(cache: KVCache, want: Held, slots: list[int], counts: list[int]) -> None:
    for slot, tokens in fill(cache, slots, counts).items():
        want[slot] = joined(want[slot], tokens)


def right(cache: KVCache, want: Held) -> bool:
    return all(same(held(cache, slot), want[slot]) for slot in want)


@layouts
def test_kept_keys_stay_and_new_ones_follow(config: CacheConfig) -> None:
    cache = KVCache(3, 3, config)
    want = fill(cache, [0, 1, 2], [50, 300, 7])
    evict(cache, want, 0, {0: 20, 1: 31, 2: 1})
    evict(cache, want, 2, {1: 300})  # all of them: nothing changes
    evict(cache, want, 2, {1: 120})
    assert cache.lengths == [50, 300, 7]
    assert [cache.slots_in_use(layer) for layer in range(3)] == [[20, 31, 1], [50, 300, 7], [50, 120, 7]]
    assert right(cache, want)
    more(cache, want, [2, 0], [1, 40])
    more(cache, want, [1], [16])
    evict(cache, want, 0, {1: 40, 0: 59})  # again, from kept and from new ones
    more(cache, want, [0, 1, 2], [1, 1, 1])
    assert cache.lengths == [91, 317, 9] and cache.slots_in_use(0) == [60, 41, 3]
    assert right(cache, want)


@layouts
def test_a_pass_has_positions_and_slots(config: CacheConfig) -> None:
    cache = KVCache(3, 2, config)
    want = fill(cache, [0, 1], [30, 20])
    for layer in (0, 2):
        evict(cache, want, layer, {1: 5})
    step = cache.begin([1, 0], [2, 3])
    assert step.pos.tolist() == [20, 21, 30, 31, 32] and step.starts == (20, 30)
    one, other = step.at(0), step.at(1)
    assert one.slot.tolist() == [5, 6, 30, 31, 32] and one.starts == (5, 30) and one.seq_lens.tolist() == [7, 33]
    assert other.slot.tolist() == step.pos.tolist() and other.seq_lens.tolist() == [22, 33]
    assert [(r.rows, r.seq, r.first) for r in one.runs or ()] == [(2, 0, 5), (3, 1, 30)]
    view = cache.view(0, step)
    assert view.slot_pos is None and view.seq_lens is one.seq_lens and view.block_table is one.table
    page, offset = view.locate(step.seq, one.slot)
    assert torch.equal(page, one.page) and torch.equal(offset, one.offset)
    for place in (one, other):
        tensors = (place.slot, place.page, place.offset, place.seq_lens, place.table)
        assert all(x.data_ptr() % 16 == 0 for x in tensors), "kernels are compiled for aligned tensors"
    assert view.capacity == cache.layouts[0].pages.size * cache.layouts[0].width([0, 1])
    part = step.take(torch.tensor([3, 0]))
    assert part.pos.tolist() == [31, 20] and part.seq.tolist() == [1, 0] and part.at(0).slot.tolist() == [31, 5]
    assert part.at(0) is part.at(2) and part.at(1) is not part.at(0) and part.at(0).runs is None


@layouts
def test_layers_that_are_alike_share_a_placement(config: CacheConfig) -> None:
    cache = KVCache(4, 2, config)
    want = fill(cache, [0, 1], [40, 30])
    step = cache.begin([0, 1], [1, 1])
    assert len(step.placements) == 1 and step.at(0) is step.at(3)
    cache.abort(step)
    for layer in (1, 3):
        evict(cache, want, layer, {0: 9})
        evict(cache, want, layer, {1: 4})
    step = cache.begin([0, 1], [1, 1])
    assert step.at(1) is step.at(3) and step.at(0) is step.at(2) and step.at(0) is not step.at(1)
    assert len(cache.layouts.groups()) == 2
    again = copy.deepcopy(cache)
    assert len(again.layouts.groups()) == 2


@layouts
def test_attention_over_what_each_head_kept(config: CacheConfig) -> None:
    cache, group = KVCache(1, 2, config), 2
    want = fill(cache, [0, 1], [60, 33])
    evict(cache, want, 0, {0: 11, 1: 8})
    step = cache.begin([1, 0], [3, 2])
    new = write(cache, step)[0]
    for row, slot in enumerate(step.host_slots):
        want[slot] = joined(want[slot], [tuple(x[step.seq == row] for x in new)])  # type: ignore[list-item]
    q = torch.randn(5, HEADS * group, DIM)
    place = step.at(0)
    rows = Rows(q, step.seq, place.slot, place.runs)
    out = attend(rows, cache.view(0, step), Spans.dense(), scale=0.5).out
    for row in range(5):
        k, v = (x.double() for x in want[step.host_slots[int(step.seq[row])]][0])
        seen = int(place.slot[row]) + 1
        for head in range(HEADS * group):
            weight = (0.5 * k[:seen, head // group] @ q[row, head].double()).softmax(0)
            torch.testing.assert_close(out[row, head].double(), weight @ v[:seen, head // group], rtol=1e-5, atol=1e-6)


# memory


def test_contiguous_memory_is_as_long_as_the_longest_sequence() -> None:
    cache = KVCache(2, 2, CacheConfig(capacity=400))
    want = fill(cache, [0, 1], [300, 100])
    token, whole = 2 * HEADS * DIM * 4, cache.nbytes
    assert whole == 2 * 2 * 400 * token
    evict(cache, want, 0, {0: 40})
    assert cache.nbytes == whole // 2 + 2 * 100 * token
    evict(cache, want, 0, {1: 10})
    assert cache.nbytes == whole // 2 + 2 * 40 * token
    more(cache, want, [0], [1])  # and grows from there
    assert cache.nbytes == whole // 2 + 2 * 80 * token
    assert right(cache, want)


def test_an_unbounded_pool_shrinks() -> None:
    cache = KVCache(2, 2, CacheConfig("paged", page=10))
    want = fill(cache, [1, 0], [95, 101])
    more(cache, want, [1], [20])  # its pages lie apart
    token, whole = 10 * 2 * HEADS * DIM * 4, cache.nbytes
    evict(cache, want, 1, {1: 31})
    assert cache.nbytes == whole // 2 + (4 + 11) * token
    evict(cache, want, 1, {0: 1})
    assert cache.nbytes == whole // 2 + (4 + 1) * token
    assert right(cache, want)
    more(cache, want, [0, 1], [10, 1])
    assert right(cache, want)


def test_a_pool_without_a_free_page_keeps_its_numbers() -> None:
    """Pages of a sequence that is not evicted from stay where they are."""
    cache = KVCache(1, 2, CacheConfig("paged", page=4, capacity=12))
    want = fill(cache, [1], [12]) | fill(cache, [0], [12])
    evict(cache, want, 0, {1: 11})  # no page less
    assert cache.layouts[0].pages.held == [[3, 4, 5], [0, 1, 2]] and right(cache, want)


def test_pages_of_a_pool_go_back_to_the_layer() -> None:
    cache = KVCache(2, 2, CacheConfig("paged", page=4, pages=6))
    want = fill(cache, [0, 1], [16, 8])
    bytes_before, place = cache.nbytes, [x.data_ptr() for pair in cache.memory for x in pair or ()]
    evict(cache, want, 0, {0: 3})
    with pytest.raises(CapacityError, match="6 pages of 4 tokens, 6 in use"):
        cache.begin([1], [1])  # there is room in layer 0 alone
    evict(cache, want, 1, {0: 4})
    more(cache, want, [1], [12])
    assert right(cache, want) and cache.nbytes == bytes_before
    assert place == [x.data_ptr() for pair in cache.memory for x in pair or ()]


@layouts
@pytest.mark.parametrize("end", ["reset", "truncate"])
def test_an_emptied_cache_is_as_new(config: CacheConfig, end: str) -> None:
    cache, other = KVCache(2, 2, config), KVCache(2, 2, config)
    want = fill(cache, [0, 1], [300, 100])
    evict(cache, want, 0, {0: 4, 1: 3})
    generation = cache.generation
    if end == "reset":
        cache.reset([0])
        assert cache.slots_in_use(0) == [0, 3]
        cache.reset([1])
    else:
        cache.truncate([0, 1], [0, 0])
    assert cache.nbytes == 0 and len(cache.layouts.groups()) == 1 and cache.generation > generation
    for one in (cache, other):
        fill(one, [0, 1], [5, 5])
    assert cache.nbytes == other.nbytes


@layouts
def test_one_sequence_is_emptied_and_another_stays(config: CacheConfig) -> None:
    cache = KVCache(2, 3, config)
    want = fill(cache, [0, 1, 2], [50, 60, 5])
    evict(cache, want, 1, {0: 4, 1: 30})
    cache.reset([0])
    assert cache.lengths == [0, 60, 5] and cache.slots_in_use(1) == [0, 30, 5]
    want |= fill(cache, [0], [44])
    assert cache.slots_in_use(1) == [44, 30, 5] and right(cache, want)
    cache.truncate([0], [20])  # its tokens are all there
    want[0] = [(k[:20], v[:20]) for k, v in want[0]]
    assert right(cache, want)


@layouts
def test_reserved_room_and_runs_of_passes_after_eviction(config: CacheConfig) -> None:
    cache = KVCache(2, 2, config)
    want = fill(cache, [0, 1], [50, 60])
    evict(cache, want, 1, {0: 4, 1: 30})
    cache.reserve([0, 1], [30, 30])
    generation, place = cache.generation, [x.data_ptr() for pair in cache.memory for x in pair or ()]
    for _ in range(30):
        more(cache, want, [0, 1], [1, 1])
    assert cache.generation == generation and place == [x.data_ptr() for pair in cache.memory for x in pair or ()]
    step = cache.begin([0], [2])
    run = cache.begin_run(step, 3)
    pages = [len(layout.pages.held[0]) for layout in cache.layouts.groups()]
    cache.commit(run, over=False)
    cache.end_run(run)
    assert cache.lengths[0] == 82 and cache.slots_in_use(1)[0] == 36
    assert [len(layout.pages.held[0]) for layout in cache.layouts.groups()] <= pages


@layouts
def test_room_is_left_for_tokens_to_come_and_no_more(config: CacheConfig) -> None:
    cache, room = KVCache(2, 2, config), 30
    want = fill(cache, [0, 1], [290, 200])
    for layer in range(2):
        kept = {0: 40 + layer, 1: 31}
        evict(cache, want, layer, kept, room)
        page = cache.page or 40 + layer + room
        pages = sum(-(-(n + room) // page) for n in kept.values()) if cache.page else 2
        if config.pages is None:
            assert cache.layouts[layer].pages.total == pages and cache.layouts[layer].pages.size == page
    generation = cache.generation
    for _ in range(room):
        more(cache, want, [0, 1], [1, 1])
    assert cache.generation == generation and right(cache, want)


# cutting


@layouts
def test_tokens_appended_since_can_be_cut_off_and_others_cannot(config: CacheConfig) -> None:
    cache = KVCache(2, 2, config)
    want = fill(cache, [0, 1], [50, 60])
    evict(cache, want, 1, {0: 14})
    kept = copy.deepcopy(want)
    more(cache, want, [0], [25])
    cache.truncate([0], [60])
    want[0] = [(k[:n], v[:n]) for (k, v), n in zip(want[0], (60, 24), strict=True)]
    assert right(cache, want)
    before = Snapshot(cache)
    with pytest.raises(Unsupported, match=r"evicted from slot 0 at 50 tokens, so it cannot be cut to 49.* or to 0"):
        cache.truncate([1, 0], [10, 49])
    assert before.unchanged(cache)
    cache.truncate([1, 0], [10, 50])
    kept[1] = [(k[:10], v[:10]) for k, v in kept[1]]
    assert right(cache, kept)
    step = cache.begin([0], [70])
    write(cache, step)
    cache.abort(step)
    assert right(cache, kept) and cache.lengths == [50, 10]


# state


def test_the_old_memory_is_gone_before_state_is_rebuilt() -> None:
    alive = list[bool]()

    class Watching(StatelessOnTruncate):
        def kept(self, layer: int, view: KVView) -> None:
            alive.extend(ref() is not None for ref in old)

    cache = KVCache(1, 1, state=Watching())
    fill(cache, [0], [9])
    old = [weakref.ref(x) for pair in cache.memory for x in pair or ()]
    cache.keep(0, [0], [random_kept(9, 3)])
    assert alive == [False, False]


class Noted(StatelessOnTruncate):
    def __init__(self, refuses: int = -1):
        self.views, self.refuses = list[tuple[int, KVView]](), refuses

    def check_keep(self, layer: int) -> None:
        if layer == self.refuses:
            raise Unsupported(f"layer {layer} keeps something else")

    def kept(self, layer: int, view: KVView) -> None:
        self.views.append((layer, view))


@layouts
def test_state_follows_with_a_view_of_all_sequences(config: CacheConfig) -> None:
    state = Noted()
    cache = KVCache(2, 3, config, state=state)
    want = fill(cache, [2, 0], [20, 30])
    evict(cache, want, 1, {0: 6})
    ((layer, view),) = state.views
    assert layer == 1 and view.seq_lens.tolist() == [6, 0, 20]
    assert view.capacity == cache.layouts[1].pages.size * cache.layouts[1].width(range(3))
    for slot in (0, 2):
        where = torch.arange(int(view.seq_lens[slot]))
        page, offset = view.locate(torch.full_like(where, slot), where)
        assert same([(view.k[page, :, offset], view.v[page, :, offset])], [want[slot][1]])


def test_a_state_that_refuses_is_heard_before_anything_changes() -> None:
    cache = KVCache(2, 1, state=Noted(refuses=1))
    want = fill(cache, [0], [9])
    evict(cache, want, 0, {0: 3})
    before = Snapshot(cache)
    with pytest.raises(Unsupported, match="layer 1 keeps something else"):
        cache.keep(1, [0], [random_kept(9, 3)])
    assert before.unchanged(cache)


# bad input


def rows(*slots: int) -> Tensor:
    return torch.tensor([slots] * HEADS)


@pytest.mark.parametrize(
    ("layer", "slots", "index", "message"),
    [
        (0, [0], [rows(1, 3, 9)], r"slot 0: expected slots in \[0, 9\), which are filled, got 1 to 9"),
        (0, [0], [rows(-1, 3)], r"expected slots in \[0, 9\), which are filled, got -1 to 3"),
        (0, [2], [rows(0)], r"slot 2: expected slots in \[0, 0\)"),
        (0, [0], [rows(1, 3, 3)], "slot 0: expected each slot at most once in a head"),
        (0, [0], [rows(3, 1)], "slot 0: expected slots in ascending order"),
        (0, [1, 0], [rows(0, 1), torch.tensor([[0, 1], [5, 2]])], "slot 0: expected slots in ascending order"),
        (0, [0], [rows()], "expected int64"),
        (0, [0], [rows().long()], "slot 0: expected at least one slot to keep; to empty it call reset"),
        (0, [0], [rows(1).int()], r"expected int64 \[G=2, n\] on cpu, got int32"),
        (0, [0], [torch.tensor([1, 2])], "expected int64"),
        (0, [0], [torch.tensor([[1, 2]])], r"expected int64 \[G=2, n\]"),
        (0, [0], [rows(1).to("meta")], "on cpu, got int64"),
        (0, [0], [None], "expected int64"),
        (0, [0, 1], [rows(1)], r"an index for each, got slots \[0, 1\] and 1 of the other"),
        (0, [0], [0, 1], r"an index for each, got slots \[0\] and 2 of the other"),
        (0, [0], [[0, 1]], r"slot 0: expected int64 \[G=2, n\] on cpu, got list"),
        (0, [0], None, "an index for each, got None"),
        (0, [0], torch.tensor(0), r"an index for each, got int64\[\]"),
        (0, [0.0], [rows(1)], r"a sequence of ints as slots, got \[0.0\]"),
        (0, None, [rows(1)], "a sequence of ints as slots, got None"),
        (0, [0, 0], [rows(1), rows(2)], r"distinct slots and an index for each, got slots \[0, 0\]"),
        (0, [3], [rows(1)], r"expected slots in \[0, 3\), got \[3\]"),
        (2, [0], [rows(1)], r"layer: expected an int in \[0, 2\), got 2"),
        ("a", [0], [rows(1)], r"layer: expected an int in \[0, 2\), got 'a'"),
        (0.0, [0], [rows(1)], r"layer: expected an int in \[0, 2\), got 0.0"),
        (True, [0], [rows(1)], r"layer: expected an int in \[0, 2\), got True"),
        (0, [True], [rows(1)], r"a sequence of ints as slots, got \[True\]"),
    ],
)
def test_what_cannot_be_kept_is_refused(layer: int, slots: Any, index: Any, message: str) -> None:
    cache = KVCache(2, 3)
    fill(cache, [0, 1], [9, 4])
    before, generation = Snapshot(cache), cache.generation
    with pytest.raises(InvalidInput, match=message):
        cache.keep(layer, slots, index)
    assert before.unchanged(cache) and cache.generation == generation


def test_an_empty_cache_keeps_nothing() -> None:
    with pytest.raises(InvalidInput, match="layer 1 holds no keys yet"):
        KVCache(2, 3).keep(1, [0], [rows(1)])


def test_a_rectangle_of_slots_may_be_given_as_one_tensor() -> None:
    cache = KVCache(1, 2, CacheConfig("paged", page=4))
    want = fill(cache, [0, 1], [9, 7])
    index = torch.stack([random_kept(9, 3), random_kept(7, 3)])
    cache.keep(0, [0, 1], index)
    assert right(cache, {slot: [taken(want[slot][0], index[slot])] for slot in (0, 1)})


def test_nothing_is_evicted_while_a_pass_is_under_way() -> None:
    cache = KVCache(1, 2)
    fill(cache, [0, 1], [9, 4])
    step = cache.begin([1], [1])
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match=r"a pass is under way in slots \[1\]; commit or abort it first"):
        cache.keep(0, [0], [rows(1)])
    assert before.unchanged(cache)
    cache.abort(step)
    cache.keep(0, [0], [rows(1)])


@pytest.mark.parametrize("config", [CacheConfig(), CacheConfig("paged", page=4)], ids=["contiguous", "paged"])
@pytest.mark.parametrize("fails_at", [1, 2])
def test_eviction_that_runs_out_of_memory_changes_nothing(
    config: CacheConfig, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache(1, 2, config)
    fill(cache, [0, 1], [40, 30])
    before, allocate, calls = Snapshot(cache), torch.Tensor.new_empty, [0]

    def new_empty(*args: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == fails_at:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(*args)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", new_empty)
        with pytest.raises(torch.OutOfMemoryError):
            cache.keep(0, [0], [random_kept(40, 5)])
    assert before.unchanged(cache)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_memory_kept_in_one_mode_serves_in_another(mode: Callable[[], Any]) -> None:
    cache = KVCache(1, 1, CacheConfig("paged", page=4))
    want = fill(cache, [0], [20])
    with mode():
        evict(cache, want, 0, {0: 5})
    assert not any(x.is_inference() for pair in cache.memory for x in pair or ())
    more(cache, want, [0], [3])
    assert right(cache, want)
