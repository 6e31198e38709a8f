"""The ring of rows as a sequence's state: what is noted, forgotten, and where it lies."""

from __future__ import annotations

import copy

import pytest
import torch

from longreach.cache import KVCache, RowRing
from longreach.cache.ring import SPARE
from longreach.errors import InvalidInput, Unsupported
from longreach.ops import Partial
from tests.cache.drive import Snapshot, fill, random_kept


def ring(dtype: torch.dtype = torch.float32) -> RowRing:
    """Three sequences, four heads over two, eight channels, a window of five rows."""
    return RowRing(3, 4, 2, 8, 5, torch.empty(0, dtype=dtype))


def note(held: RowRing, slot: int, positions: list[int]) -> tuple[torch.Tensor, Partial]:
    count = len(positions)
    query = torch.randn(count, 4, 8)
    entry = Partial(torch.randn(count, 4, 8), torch.randn(count, 4))
    held.note(torch.full((count,), slot), torch.tensor(positions), query, entry, 3.0)
    return query, entry


def stamps(held: RowRing, slot: int) -> list[int]:
    return sorted(p for p in held.ring.stamp[slot].tolist() if p >= 0)


def test_rows_lie_where_their_position_says() -> None:
    held = ring()
    assert held.ring.size == 5 + SPARE and bool((held.ring.stamp == -1).all())
    query, entry = note(held, 1, [20, 21, 40])
    assert stamps(held, 1) == [20, 21, 40] and stamps(held, 0) == stamps(held, 2) == []
    for row, pos in enumerate([20, 21, 40]):
        place = pos % held.ring.size
        assert int(held.ring.stamp[1, place]) == pos
        assert torch.equal(held.ring.query[1, :, place], query[row])
        assert held.ring.depth[1, :, place].tolist() == [0] * 4 and held.ring.credit[1, :, place].tolist() == [3.0] * 2
        for head in range(4):
            at = (1 * 4 + head) * held.ring.size + place
            assert torch.equal(held.entries.out[at], entry.out[row, head])
            assert torch.equal(held.entries.lse[at], entry.lse[row, head])
    note(held, 1, [20 + held.ring.size])
    assert stamps(held, 1) == [21, 20 + held.ring.size, 40]


def test_what_is_reset_or_cut_off_is_no_longer_there() -> None:
    held = ring()
    for slot in range(3):
        note(held, slot, list(range(30, 36)))
    held.reset(torch.tensor([2]))
    held.check_truncate(torch.tensor([0, 1]), torch.tensor([33, 0]))
    held.truncate(torch.tensor([0, 1]), torch.tensor([33, 0]))
    assert stamps(held, 0) == [30, 31, 32] and stamps(held, 1) == stamps(held, 2) == []
    note(held, 2, [0, 1])
    assert stamps(held, 2) == [0, 1]


def test_memory_stays_where_it_is_and_a_copy_is_another() -> None:
    held = ring()
    places = [x.data_ptr() for x in (held.ring.query, held.ring.stamp, *held.entries)]
    other = copy.deepcopy(held)
    note(held, 0, [1, 2])
    held.reset(torch.tensor([1]))
    assert places == [x.data_ptr() for x in (held.ring.query, held.ring.stamp, *held.entries)]
    assert stamps(other, 0) == []


def test_a_snapshot_is_put_back_into_the_same_memory() -> None:
    held = ring()
    note(held, 0, [1, 2, 3])
    whole = [x.clone() for x in (held.ring.query, held.ring.stamp, *held.entries)]
    with torch.inference_mode():
        restore = held.snapshot()
    note(held, 0, [4, 1 + held.ring.size, 5 + held.ring.size])
    held.truncate(torch.tensor([0]), torch.tensor([4]))
    assert stamps(held, 0) == [2, 3]
    restore()
    assert stamps(held, 0) == [1, 2, 3] and held.generation == 0
    for x, y in zip((held.ring.query, held.ring.stamp, *held.entries), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_keys_under_its_results_cannot_be_evicted() -> None:
    state = ring()
    cache = KVCache(1, 3, state=state)
    fill(cache, [0], [9])
    note(state, 0, [7, 8])
    before = Snapshot(cache)
    with pytest.raises(Unsupported, match="layer 0 keeps results of attention over earlier keys"):
        cache.keep(0, [0], [random_kept(9, 3)])
    assert before.unchanged(cache)


def test_an_empty_ring_blocks_no_eviction() -> None:
    state = ring()
    cache = KVCache(1, 3, state=state)
    fill(cache, [0, 1], [9, 5])
    note(state, 1, [3, 4])
    cache.reset([1])
    cache.keep(0, [0], [random_kept(9, 3)])
    assert cache.slots_in_use(0)[0] == 3


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes_and_bytes(dtype: torch.dtype, entry: torch.dtype) -> None:
    held = ring(dtype)
    assert held.ring.query.dtype == dtype and held.entries.out.dtype == held.entries.lse.dtype == entry
    wide = entry.itemsize
    row = 4 * 8 * dtype.itemsize + 4 + 4 * 2 + 2 * wide + 4 * 8 * wide + 4 * wide
    assert held.bytes_per_sequence == held.ring.size * row + 2 * 4


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="window: expected a count >= 1, got 0"):
        RowRing(1, 4, 2, 8, 0, torch.empty(0))
