"""Sequences of a cache chosen for another one, and packed for a file and back, also after eviction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig, KVCache, packed, restore, selected
from longreach.errors import CapacityError, InvalidInput

LENGTHS, G, D = (37, 5, 18), 2, 8
CONFIGS = {
    "contiguous": CacheConfig(),
    "fixed": CacheConfig(capacity=80),
    "paged": CacheConfig("paged", page=8),
    "pool": CacheConfig("paged", page=8, pages=30),
    "host": CacheConfig(host=True),
}


def rows(length: int, layer: int, slot: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * layer + slot)
    k, v = torch.randn(2, length, G, D, generator=made)
    return k, v


def filled(config: CacheConfig, *, evict: bool = False) -> KVCache:
    """Two layers of three sequences, of which layer 1 has evicted every second key of sequence 0."""
    cache = KVCache(2, 3, config)
    step = cache.begin(range(3), LENGTHS)
    for layer in range(2):
        each = [rows(n, layer, slot) for slot, n in enumerate(LENGTHS)]
        cache.append(layer, step, *(torch.cat(x) for x in zip(*each, strict=True)))
    cache.commit(step)
    if evict:
        cache.keep(1, [0], torch.arange(0, 36, 2).expand(1, G, -1))
    return cache


def held(cache: KVCache, layer: int, slot: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, [n, G, D], as a view finds them."""
    view, n = cache.view_of_all(layer), cache.slots_in_use(layer)[slot]
    at = torch.arange(n)
    assert view.block_table is not None
    page = view.block_table[slot, at // view.page]
    return view.k[page, :, at % view.page], view.v[page, :, at % view.page]


def alike(one: KVCache, two: KVCache, slots: list[int]) -> bool:
    """Whether sequence n of `two` is sequence slots[n] of `one`, in every layer."""
    pairs = ((held(one, layer, s), held(two, layer, n)) for layer in range(2) for n, s in enumerate(slots))
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_are_copied_and_go_on(name: str, evict: bool) -> None:
    if evict and name == "host":
        pytest.skip("keys in host memory stay")
    cache, order = filled(CONFIGS[name], evict=evict), [2, 0, 0, 1]
    new = selected(cache, order)
    assert new.lengths == [LENGTHS[s] for s in order] and alike(cache, new, order)
    assert [new.slots_in_use(1)[n] for n in (1, 2)] == [cache.slots_in_use(1)[0]] * 2
    before = [[held(cache, layer, slot) for slot in range(3)] for layer in range(2)]
    step = new.begin(range(4), [30] * 4)
    for layer in range(2):
        new.append(layer, step, torch.ones(120, G, D), torch.ones(120, G, D))
    new.commit(step)
    for layer, slots in enumerate(before):
        for slot, pair in enumerate(slots):
            assert all(torch.equal(a, b) for a, b in zip(pair, held(cache, layer, slot), strict=True))
    for number, slot in enumerate(order):
        k, _ = held(new, 1, number)
        assert torch.equal(k[:-30], before[1][slot][0]) and bool((k[-30:] == 1).all())


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_keys_fill_an_empty_cache(name: str, evict: bool) -> None:
    if evict and name == "host":
        pytest.skip("keys in host memory stay")
    cache, new = filled(CONFIGS[name], evict=evict), KVCache(2, 3, CONFIGS[name])
    layouts = [cache.layouts[layer] for layer in range(2)]
    pairs = [(packed(cache, layer, 0), packed(cache, layer, 1)) for layer in range(2)]
    gone, at = [x.dropped for x in layouts], [x.evicted_at for x in layouts]
    restore(new, cache.lengths, gone, at, pairs)
    assert new.lengths == list(LENGTHS) and alike(cache, new, [0, 1, 2]) and new.evicted(1) == evict
    new.reset(range(3))
    assert new.lengths == [0, 0, 0]
    with pytest.raises(InvalidInput, match="expected an empty cache"):
        restore(cache, cache.lengths, gone, at, pairs)
    with pytest.raises(InvalidInput, match=r"layer 0: expected keys and values \[\d+, G, D\]"):
        restore(KVCache(2, 3, CONFIGS[name]), cache.lengths, gone, at, [(k[1:], v[1:]) for k, v in pairs])


def test_what_does_not_fit_is_refused_with_nothing_changed() -> None:
    cache = filled(CacheConfig("paged", page=8, pages=10))
    for slots in ([], [3], [-1], [True], [0.5]):
        with pytest.raises(InvalidInput, match=r"expected sequences in \[0, 3\)"):
            selected(cache, slots)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="has 10 pages of 8 tokens, and the 3 sequences need 15"):
        selected(cache, [0, 0, 0])
    step = cache.begin([1], [1])
    with pytest.raises(InvalidInput, match=r"a pass is under way in slots \[1\]"):
        selected(cache, [0])
    cache.abort(step)
    assert cache.lengths == list(LENGTHS)
