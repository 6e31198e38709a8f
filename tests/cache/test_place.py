"""Rows at given positions: imported in bulk, or written over what is there, in all layers or in some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig, KVCache, StatelessOnTruncate
from longreach.errors import CapacityError, InvalidInput, Unsupported
from longreach.ops import KVView
from longreach.ops.rope import RotaryAngles
from tests.cache.drive import (
    DIM,
    HEADS,
    Snapshot,
    Tokens,
    fill,
    held,
    joined,
    random_kept,
    random_tokens,
    same,
    split,
    write,
)

LAYOUTS = {
    "contiguous": CacheConfig(capacity=400),
    "contiguous, growing": CacheConfig(),
    "paged": CacheConfig("paged", capacity=400, page=7),
    "paged, growing": CacheConfig("paged", page=16),
    "pool": CacheConfig("paged", page=16, pages=60),
}
layouts = pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)


def overwritten(tokens: Tokens, positions: list[int], new: Tokens) -> Tokens:
    """The tokens with those at `positions` replaced; positions past them are added."""
    missing = max([*positions, len(tokens[0]) - 1]) + 1 - len(tokens[0])
    k, v = (torch.cat([x, x.new_empty(missing, *x.shape[1:])]) for x in tokens)
    k[positions], v[positions] = new
    return k, v


@layouts
def test_an_import_is_a_pass_over_the_next_positions(config: CacheConfig) -> None:
    cache = KVCache(2, 3, config)
    want = fill(cache, [1], [5])
    step = cache.place([2, 1, 0], [range(300), torch.arange(5, 12), []])
    assert step.counts == step.added == (300, 7, 0) and step.pos.tolist() == [*range(300), *range(5, 12)]
    assert [(r.rows, r.seq, r.first) for r in step.at(0).runs or ()] == [(300, 0, 0), (7, 1, 5), (0, 2, 0)]
    found = split(step, write(cache, step))
    cache.commit(step)
    assert cache.lengths == [0, 12, 300]
    assert same(held(cache, 2), found[2]) and same(held(cache, 1), joined(want[1], found[1]))


@layouts
def test_tokens_are_overwritten_and_the_next_ones_added_in_one_pass(config: CacheConfig) -> None:
    cache = KVCache(2, 2, config)
    want = fill(cache, [0, 1], [40, 30])
    positions = {1: [0, 7, 29, 30, 31], 0: [3, 4, 39]}
    step = cache.place(list(positions), list(positions.values()), overwrite=True)
    assert step.counts == (5, 3) and step.added == (2, 0) and step.starts == (30, 40)
    place = step.at(0)
    assert place.seq_lens.tolist() == [32, 40] and place.runs is None
    assert place.slot.tolist() == step.pos.tolist() == [*positions[1], *positions[0]]
    found = split(step, write(cache, step))
    cache.commit(step)
    assert cache.lengths == [40, 32]
    for slot, at in positions.items():
        both = zip(want[slot], found[slot], strict=True)
        want[slot] = [overwritten(tokens, at, new) for tokens, new in both]
        assert same(held(cache, slot), want[slot])
    more = fill(cache, [0, 1], [1, 1])
    assert all(same(held(cache, slot), joined(want[slot], more[slot])) for slot in (0, 1))


def test_consecutive_rows_are_known_to_the_host() -> None:
    cache = KVCache(1, 2)
    fill(cache, [0, 1], [40, 30])
    step = cache.place([0, 1], [range(10, 20), range(28, 33)], overwrite=True)
    assert [(r.rows, r.seq, r.first) for r in step.at(0).runs or ()] == [(10, 0, 10), (5, 1, 28)]


@layouts
def test_a_pass_places_other_rows_in_other_layers(config: CacheConfig) -> None:
    """Rows chosen of a prompt, and a question: all of them in the first layer, fewer in the second."""
    cache = KVCache(2, 2, config)
    want = fill(cache, [0, 1], [20, 9])
    step = cache.place([0, 1], [range(22), range(9)], overwrite=True)
    index = torch.tensor([20, 3, 21, 30, 17])  # two rows of sequence 0, its question, one row of sequence 1
    first, second = random_tokens(31), random_tokens(5)
    cache.append(0, step, *first)
    cache.append(1, step, *second, rows=index)
    cache.commit(step)
    want[0][0] = (first[0][:22], first[1][:22])
    want[1][0] = (first[0][22:], first[1][22:])
    want[0][1] = overwritten(want[0][1], [20, 3, 21, 17], (second[0][[0, 1, 2, 4]], second[1][[0, 1, 2, 4]]))
    want[1][1] = overwritten(want[1][1], [8], (second[0][[3]], second[1][[3]]))
    assert all(same(held(cache, slot), want[slot]) for slot in (0, 1))
    part = step.take(index)
    assert part.pos.tolist() == [20, 3, 21, 8, 17] and part.at(1).slot.tolist() == part.pos.tolist()


class Copies(StatelessOnTruncate):
    """A copy of the keys of one layer of one page a sequence, kept by what `written` says alone."""

    def __init__(self, like: Tensor):
        self.keys = torch.full_like(like, torch.nan)

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        page, offset = view.locate(seq, slot)
        self.keys[page, :, offset] = view.k[page, :, offset]


def test_state_gets_the_sequence_and_slot_of_each_row_that_is_written() -> None:
    """Rows of several sequences, appended in parts and in an order of their own."""
    cache = KVCache(1, 3)
    fill(cache, [0, 1, 2], [20, 9, 15])
    memory = cache.memory[0]
    assert memory is not None
    cache.state = state = Copies(memory[0])
    positions = {2: [3, 14], 0: [0, 5, 19], 1: [8]}
    step = cache.place(list(positions), list(positions.values()), overwrite=True)
    for rows in ([4, 1], [5], [3, 0, 2]):
        cache.append(0, step, *random_tokens(len(rows)), rows=torch.tensor(rows))
    cache.commit(step)
    for slot, at in positions.items():
        (page,) = cache.layouts[0].pages.held[slot]
        assert torch.equal(state.keys[page][:, at], memory[0][page][:, at])
    assert int((~state.keys.isnan()).sum()) == 6 * HEADS * DIM, "no other keys"


class Ends(StatelessOnTruncate):
    def __init__(self) -> None:
        self.cuts = list[dict[int, int]]()

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        self.cuts.append(dict(zip(slots.tolist(), lengths.tolist(), strict=True)))


@layouts
@pytest.mark.parametrize("end", ["abort", "begin", "reset another"])
def test_a_failed_overwriting_pass_cuts_to_what_it_did_not_overwrite(config: CacheConfig, end: str) -> None:
    state = Ends()
    cache = KVCache(2, 3, config, state=state)
    want = fill(cache, [0, 1, 2], [40, 30, 10])
    step = cache.place([1, 0], [[12, 20, 30], [40]], overwrite=True)
    cache.append(0, step, *random_tokens(4))
    if end == "reset another":
        cache.reset([2])
    elif end == "begin":
        again = cache.begin([1], [2])
        assert again.starts == (12,) and again.pos.tolist() == [12, 13]
        cache.abort(again)
    cache.abort(step)
    want[1] = [(k[:12], v[:12]) for k, v in want[1]]
    assert cache.lengths[:2] == [40, 12] and all(same(held(cache, slot), want[slot]) for slot in (0, 1))
    assert {0: 40, 1: 12}.items() <= {k: v for cut in state.cuts for k, v in cut.items()}.items()


def test_what_is_being_overwritten_cannot_be_kept_by_a_cut() -> None:
    cache = KVCache(1, 1)
    want = fill(cache, [0], [20])
    cache.append(0, cache.place([0], [[5, 9]], overwrite=True), *random_tokens(2))
    with pytest.raises(InvalidInput, match="slot 0 holds 5 tokens, cannot keep 6"):
        cache.truncate([0], [6])
    cache.truncate([0], [5])
    assert same(held(cache, 0), [(want[0][0][0][:5], want[0][0][1][:5])])


def test_a_pass_that_is_over_overwrites_nothing() -> None:
    cache = KVCache(1, 1)
    fill(cache, [0], [20])
    step = cache.place([0], [[5, 9]], overwrite=True)
    cache.append(0, step, *random_tokens(2))
    cache.commit(step)
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match="this pass is over"):
        cache.append(0, step, *random_tokens(2))
    cache.abort(step)
    assert before.unchanged(cache) and cache.lengths == [20]


@pytest.mark.parametrize(
    ("positions", "overwrite", "message"),
    [
        ([3], False, r"slot 0 holds 4 tokens, so position 3 is in use; pass overwrite=True"),
        ([0, 1, 2, 3, 4], False, "position 0 is in use"),
        ([4, 5, 5], False, "slot 0: position 5 after 5 goes back"),
        ([4, 5, 4], False, "slot 0: position 4 after 5 goes back"),
        ([2, 1], True, "slot 0: position 1 after 2 goes back"),
        ([5], False, "slot 0: position 5 skips some; expected 4, the next one"),
        ([4, 5, 7], False, "slot 0: position 7 skips some; expected 6, the next one"),
        ([1, 5], True, "slot 0: position 5 skips some; expected 4, the next one"),
        ([-1, 4], True, "expected positions >= 0, got -1"),
        ([4.0], False, "expected a list or int tensor"),
        (torch.tensor([[4]]), False, "expected a list or int tensor"),
        (torch.tensor([4.0]), False, "expected a list or int tensor"),
        (torch.tensor([True]), False, "expected a list or int tensor"),
        (torch.tensor([4], device="meta"), False, "on the host, got int64"),
    ],
)
def test_positions_that_cannot_be_placed_are_refused(positions: Any, overwrite: bool, message: str) -> None:
    cache = KVCache(1, 2)
    want = fill(cache, [0, 1], [4, 4])
    open_pass = cache.begin([1], [1])
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match=message):
        cache.place([1, 0], [[4], positions], overwrite=overwrite)
    assert before.unchanged(cache) and same(held(cache, 0), want[0])
    write(cache, open_pass)
    cache.commit(open_pass)  # a call that is refused ends no pass


@pytest.mark.parametrize(
    ("slots", "positions", "message"),
    [
        ([0, 0], [[4], [5]], r"distinct slots and positions for each, got slots \[0, 0\] and 2 of the other"),
        ([0], [[4], [5]], r"positions for each, got slots \[0\] and 2 of the other"),
        ([2], [[0]], r"slots in \[0, 2\), got \[2\]"),
        ([0.0], [[4]], r"a sequence of ints as slots, got \[0.0\]"),
        ([None], [[4]], r"a sequence of ints as slots, got \[None\]"),
        (0, [[4]], "a sequence of ints as slots, got 0"),
        ([0], None, "positions for each, got None"),
        ([0], torch.tensor(4), r"positions for each, got int64\[\]"),
        ([0], 4, "positions for each, got 4"),
        ([0], [None], "slot 0: expected a list or int tensor .* of positions, got None"),
        ([0], ["a"], "slot 0: expected a list or int tensor .* of positions, got 'a'"),
        ([0], [["a"]], r"slot 0: expected a list or int tensor .* of positions, got \['a'\]"),
        ([0], [[[4], [5, 6]]], "slot 0: expected a list or int tensor .* of positions"),
        ([0], [[2**70]], "slot 0: expected a list or int tensor .* of positions"),
    ],
)
def test_slots_that_do_not_fit_are_refused(slots: Any, positions: Any, message: str) -> None:
    cache = KVCache(1, 2)
    fill(cache, [0, 1], [4, 4])
    with pytest.raises(InvalidInput, match=message):
        cache.place(slots, positions)


def test_an_import_that_does_not_fit_is_refused() -> None:
    cache = KVCache(1, 1, CacheConfig(capacity=10))
    fill(cache, [0], [4])
    before = Snapshot(cache)
    with pytest.raises(CapacityError, match="holds 10 tokens a sequence, 11 are needed"):
        cache.place([0], [range(4, 11)])
    assert before.unchanged(cache)


def test_tokens_of_a_sequence_that_was_evicted_from_cannot_be_overwritten() -> None:
    cache = KVCache(3, 2)
    want = fill(cache, [0, 1], [20, 20])
    cache.keep(1, [0], [random_kept(20, 5)])
    before = Snapshot(cache)
    with pytest.raises(
        Unsupported, match=r"position 19 of slot 0 cannot be overwritten.*evicted from it in layers \[1\]"
    ):
        cache.place([1, 0], [[3], [19]], overwrite=True)
    assert before.unchanged(cache)
    cache.abort(cache.place([0], [[20, 21]], overwrite=True))  # new positions are
    step = cache.place([1], [[3]], overwrite=True)  # and so are other sequences
    (new,) = split(step, write(cache, step)).values()
    cache.commit(step)
    assert same(held(cache, 1), [overwritten(t, [3], n) for t, n in zip(want[1], new, strict=True)])


def test_state_that_cannot_be_cut_refuses_before_anything_changes() -> None:
    """A pass that fails would be cut there."""

    class Uncut(Ends):
        def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
            for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
                raise Unsupported(f"slot {slot} cannot be cut to {length}")

    cache = KVCache(1, 2, state=Uncut())
    fill(cache, [0, 1], [20, 20])
    before = Snapshot(cache)
    with pytest.raises(Unsupported, match="slot 1 cannot be cut to 3"):
        cache.place([0, 1], [[20], [3, 5]], overwrite=True)
    assert before.unchanged(cache)
    cache.place([0, 1], [[20], [20, 21]], overwrite=True)


@pytest.mark.parametrize(
    "rows", [torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([True]), torch.tensor([0], device="meta"), [0]]
)
def test_rows_of_a_layer_that_are_no_index_are_refused(rows: Any) -> None:
    cache = KVCache(1, 1)
    fill(cache, [0], [4])
    step = cache.begin([0], [2])
    before = Snapshot(cache)
    with pytest.raises(InvalidInput, match=r"rows: expected int \[r\] on cpu"):
        cache.append(0, step, *random_tokens(1), rows=rows)
    with pytest.raises(InvalidInput, match=r"k: expected float \[R=1, G, D\]"):
        cache.append(0, step, *random_tokens(2), rows=torch.tensor([1]))
    assert before.unchanged(cache)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], r"rows: expected in \[0, R=3\), got 0 to 3"),
        ([-1, 0], r"rows: expected in \[0, R=3\), got -1 to 0"),
        ([2, 0, 2], "rows: expected each row of the pass at most once, got one twice"),
        ([0, 1, 2, 0], "rows: expected at most the 3 of the pass, each once, got 4"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_are_not_of_the_pass_are_refused(rows: list[int], message: str, dtype: torch.dtype) -> None:
    cache = KVCache(1, 2)
    fill(cache, [0, 1], [4, 4])
    step = cache.begin([0, 1], [2, 1])
    before, (k, v) = Snapshot(cache), random_tokens(len(rows))
    with pytest.raises(InvalidInput, match=message):
        cache.append(0, step, k, v, rows=torch.tensor(rows, dtype=dtype))
    assert before.unchanged(cache)
    cache.append(0, step, k[:0], v[:0], rows=torch.tensor([], dtype=dtype))
    assert before.unchanged(cache)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("count", [1, 3])
def test_keys_and_values_of_another_number_of_rows_are_refused(side: str, count: int) -> None:
    cache = KVCache(1, 1)
    fill(cache, [0], [4])
    step, both = cache.begin([0], [4]), {name: random_tokens(2)[0] for name in "kv"}
    both[side] = random_tokens(count)[0]
    before = Snapshot(cache)
    message = {"k": r"k: expected float \[R=2, G, D\]", "v": r"v: expected .* like k"}[side]
    with pytest.raises(InvalidInput, match=message):
        cache.append(0, step, **both, rows=torch.tensor([3, 1]))
    angles = RotaryAngles(*torch.randn(2, count, DIM // 2), "half")
    with pytest.raises(InvalidInput, match=r"cos: expected float \[R=2, rotary/2\]"):
        cache.append(0, step, *random_tokens(2), torch.tensor([3, 1]), angles)
    assert before.unchanged(cache)


def test_new_tokens_of_every_dtype_of_index() -> None:
    cache = KVCache(1, 1)
    step = cache.place([0], [torch.arange(3, dtype=torch.int32)])
    k = torch.randn(3, HEADS, DIM)
    cache.append(0, step, k[[1, 0, 2]], k[[1, 0, 2]], rows=torch.tensor([1, 0, 2], dtype=torch.int32))
    cache.commit(step)
    assert same(held(cache, 0), [(k, k)])
