"""Caches use host memory one after another; it is allocated in slabs that hold layers of any size."""

from __future__ import annotations

import pytest
import torch

from longreach.cache import CacheConfig, KVCache, host_pool
from longreach.cache.host_pool import HostPool
from longreach.errors import CapacityError, InvalidInput

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "HUGE_PAGE", 64)


def test_blocks_of_other_sizes_lie_in_the_same_slabs() -> None:
    pool = HostPool(CPU, slab=1024)
    pool.reserve(6, 256)
    assert pool.nbytes == 1536 and pool.seconds > 0
    blocks = [pool.take((8, 8), torch.float32, CPU) for _ in range(6)]
    for number, block in enumerate(blocks):
        block.fill_(number)
    assert all(bool((block == number).all()) for number, block in enumerate(blocks))
    pool.take((4,), torch.float32, CPU)
    assert pool.nbytes == 1600  # all was lent
    pool.reclaim()
    pool.reserve(2, 512)
    first = pool.take((16, 16), torch.bfloat16, CPU)
    assert pool.nbytes == 1600 and first.data_ptr() == blocks[0].data_ptr() and first.shape == (16, 16)


def test_a_block_larger_than_a_slab_has_its_own() -> None:
    pool = HostPool(CPU, slab=128)
    assert pool.take((1000,), torch.uint8, CPU).numel() == 1000
    assert pool.nbytes == 1024


def test_slabs_of_the_wrong_size_go_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(CPU, slab=256)
    pool.reserve(4, 128)

    def check(nbytes: int) -> None:
        if pool.nbytes + nbytes > 1024:
            raise CapacityError("too little")

    monkeypatch.setattr(host_pool, "check_available", check)
    pool.reserve(2, 512)
    assert pool.nbytes == 1024
    with pytest.raises(CapacityError, match="too little"):
        pool.reserve(3, 512)


def test_a_cache_takes_its_host_memory_from_the_pool() -> None:
    pool, kept = HostPool(CPU), list[int]()
    for _ in range(2):
        cache = KVCache(2, 1, CacheConfig(capacity=16, host=True))
        cache.use_pool(pool)
        step = cache.begin([0], [9])
        k, v = torch.randn(2, 9, 2, 8)
        for layer in range(2):
            cache.append(layer, step, k, v)
            assert torch.equal(cache.view(layer, step).k[0, :, :9], k.transpose(0, 1))
        cache.commit(step)
        assert cache.memory[0] is not None
        kept.append(cache.memory[0][0].data_ptr())
        pool.reclaim()
    assert kept[0] == kept[1] and pool.nbytes == 4 * 2 * 16 * 8 * 4
    with pytest.raises(InvalidInput, match="already has memory"):
        cache.use_pool(pool)
    with pytest.raises(InvalidInput, match="expected a fixed size"):
        KVCache(2, 1, CacheConfig(host=True)).use_pool(pool)
