"""Chunks in a pool: the same answer as from chunks anywhere else, and what is copied when."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from longreach.adapters.transformers.fusing import loading
from longreach.adapters.transformers.fusing.loading import Loading
from longreach.errors import InvalidInput
from longreach.ops import HeadShard
from longreach.store import Chunk, ChunkPool
from longreach.store import pool as pool_module
from longreach.store.pool import PooledChunk, pooled

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def chunk(tokens: int, seed: int, layers: int = 5, dtype: torch.dtype = torch.bfloat16) -> Chunk:
    """Random keys of 16 channels and values of 8, of 2 heads."""
    draw = torch.Generator().manual_seed(seed)
    keys = [torch.randn(2, tokens, 16, generator=draw).to(dtype) for _ in range(layers)]
    values = [torch.randn(2, tokens, 8, generator=draw).to(dtype) for _ in range(layers)]
    return Chunk.of("model", [seed], torch.arange(tokens) + seed, keys, values)


def expected(chunks: list[Chunk], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.cat([getattr(c, name)[layer] for c in chunks], 1).transpose(0, 1) for name in ("keys", "values"))
    return k, v


def test_a_pooled_chunk_is_the_chunk_in_one_piece() -> None:
    given, pool = chunk(7, 1), ChunkPool(1 << 20, pinned=False)
    held = pool.add(given)
    assert isinstance(held, PooledChunk) and pool.get(given.key) is held
    assert held.key == given.key and torch.equal(held.prefix, given.prefix) and held.dependence is None
    for mine, other in zip((*held.keys, *held.values), (*given.keys, *given.values), strict=True):
        assert torch.equal(mine, other) and mine.untyped_storage().data_ptr() == held.memory.data_ptr()
    assert held.starts == tuple(7 * 2 * 24 * n for n in range(6))
    given.keys[0].zero_()
    assert not torch.equal(held.keys[0], given.keys[0]), "a copy"


def test_the_longest_unused_leave_first_and_stay_valid() -> None:
    chunks = [chunk(8, seed) for seed in range(4)]
    size = chunks[0].bytes
    pool = ChunkPool(3 * size, pinned=False)
    held = [pool.add(c) for c in chunks[:3]]
    assert pool.get(chunks[0].key) is held[0] and pool.bytes == 3 * size
    pool.add(chunks[3])
    assert pool.get(chunks[1].key) is None and len(pool) == 3 and pool.bytes == 3 * size
    assert torch.equal(held[1].keys[2], chunks[1].keys[2]), "in use, it stays valid"
    assert (pool.hits, pool.misses) == (1, 1)
    assert pool.add(chunks[2]) is not held[2] and len(pool) == 3, "one of a key"
    large = chunk(8 * 4, 9)
    assert pool.add(large) is large and len(pool) == 3, "nothing leaves for what does not fit"
    pool.clear()
    assert len(pool) == pool.bytes == 0


def test_a_chunk_of_a_key_is_replaced_and_counted_once() -> None:
    pool = ChunkPool(1 << 20, pinned=False)
    one = chunk(8, 1)
    pool.add(one)
    held = pool.add(replace(one, dependence=torch.rand(8).double()))
    assert pool.bytes == held.bytes and len(pool) == 1 and pool.get(one.key) is held
    assert held.dependence is not None
    for seed in range(2, 5):
        pool.add(chunk(8, seed))
    assert pool.bytes == sum(c.bytes for c in pool._held.values()) and len(pool) == 4


def test_page_locked_memory_counts_by_the_power_of_two_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "pooled", lambda chunk, pinned: pooled(chunk, False))
    one = chunk(9, 1)  # 2 heads of 9 tokens of 24 channels of 2 bytes in 5 layers: 4320
    pool = ChunkPool(16384, pinned=True)
    assert one.bytes == 4320
    pool.add(one)
    assert pool.bytes == 8192
    pool.add(chunk(9, 2))
    assert pool.bytes == 16384 and len(pool) == 2
    pool.add(chunk(9, 3))
    assert pool.bytes == 16384 and len(pool) == 2 and pool.get(one.key) is None


def test_a_chunk_larger_than_the_pool_is_warned_of_once() -> None:
    pool = ChunkPool(5000, pinned=True)  # takes 8192 of page-locked memory
    with pytest.warns(UserWarning, match=r"takes 8192 bytes and the pool holds 5000: .*without overlap; raise Chunk"):
        assert not isinstance(pool.add(chunk(9, 1)), PooledChunk)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.add(chunk(9, 2))
        ChunkPool(4000, pinned=False).add(chunk(9, 1))  # memory as any other


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"])
def test_a_cap_that_is_none(size: object) -> None:
    with pytest.raises(InvalidInput, match="max_bytes: expected a number of bytes"):
        ChunkPool(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("pinned", [None, False])
def test_layers_on_the_cpu(pinned: bool | None) -> None:
    chunks = [chunk(n, seed) for seed, n in enumerate((3, 8, 8, 5))]
    if pinned is not None:
        pool = ChunkPool(1 << 20, pinned=pinned)
        chunks = [pool.add(c) for c in chunks]
    loading = Loading(chunks, torch.device("cpu"), 1, 5)
    for layer in range(1, 5):
        for mine, want in zip(loading.layer(layer), expected(chunks, layer), strict=True):
            assert torch.equal(mine, want)
    assert torch.equal(loading.values(0), expected(chunks, 0)[1])
    assert loading.bytes == 0 and loading.waits == [] and not loading.runs_ahead


SHARDS = [HeadShard(n, 1, 2) for n in range(2)] + [HeadShard.whole(2)]


def named(shard: HeadShard | None) -> str:
    return "no shard" if shard is None else f"{shard.first} of {shard.total}, {shard.count}"


@pytest.mark.parametrize("shard", SHARDS, ids=named)
def test_a_rank_loads_its_own_heads(shard: HeadShard) -> None:
    chunks, known = [chunk(n, seed) for seed, n in enumerate((3, 8, 8))], dict[int, HeadShard]()
    loading = Loading(chunks, torch.device("cpu"), 0, 5, known)
    for layer in range(5):
        known[layer] = shard  # known when the layer is asked for
        for mine, want in zip(loading.layer(layer), expected(chunks, layer), strict=True):
            assert torch.equal(mine, shard.slice(want, 1))
        assert torch.equal(loading.values(layer), shard.slice(expected(chunks, layer)[1], 1))


class InOrder:
    """A stream, an event or a context of a device that does everything at once."""

    def __init__(self, *args: object, **options: object):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def nothing(self, *args: object) -> None:
        pass

    record = wait_event = wait_stream = nothing


@pytest.mark.parametrize("shard", [None, *SHARDS], ids=named)
@pytest.mark.parametrize("group", [1, 700, 1 << 28])  # a layer at a time, some, all
def test_groups_of_layers_hold_what_they_should(
    shard: HeadShard | None, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies that run ahead, on a device that is the CPU."""
    monkeypatch.setattr(loading, "GROUP_BYTES", group)
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, InOrder)
    monkeypatch.setattr(torch.Tensor, "record_stream", InOrder.nothing)
    pool = ChunkPool(1 << 20, pinned=False)
    chunks = [pool.add(chunk(n, seed, layers=7)) for seed, n in enumerate((8, 8, 3, 8))]
    held = [c for c in chunks if isinstance(c, PooledChunk)]
    shards = None if shard is None else dict.fromkeys(range(7), shard)
    ahead = loading._Ahead(held, torch.device("cpu"), torch.cuda.Stream(), 2, 7, shards)
    assert len(ahead.bounds) > 1 or group > 700
    for layer in range(2, 7):
        for mine, want in zip(ahead.layer(layer), expected(chunks, layer), strict=True):
            assert torch.equal(mine, want if shard is None else shard.slice(want, 1))
    share = 1 if shard is None else shard.count / shard.total
    assert ahead.bytes == sum(c.bytes for c in chunks) * 5 / 7 * share


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shard", [None, SHARDS[1]], ids=named)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("group", [1, 3000, 1 << 28])  # a layer at a time, some, all
def test_copies_ahead(first: int, group: int, shard: HeadShard | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are filled again only when what they held has been read, however far the host runs ahead."""
    monkeypatch.setattr(loading, "GROUP_BYTES", group)
    pool, device = ChunkPool(1 << 26), torch.device("cuda")
    chunks = [pool.add(chunk(n, seed, layers=9)) for seed, n in enumerate((512, 512, 100, 512, 3))]
    shards = None if shard is None else dict.fromkeys(range(9), shard)
    ahead = Loading(chunks, device, first, 9, shards, values=first - 1 if first else None)
    torch.cuda._sleep(20_000_000)  # the device is behind
    early = ahead.values(first - 1).cpu() if first else None
    found = [ahead.layer(layer) for layer in range(first, 9)]
    for layer, pair in enumerate(found, first):
        for mine, want in zip(pair, expected(chunks, layer), strict=True):
            assert torch.equal(mine.cpu(), want if shard is None else shard.slice(want, 1))
    layers = 9 - first
    if early is not None:
        want = expected(chunks, first - 1)[1]
        assert torch.equal(early, want if shard is None else shard.slice(want, 1))
        layers += 8 / 24  # of a layer, its values
    assert ahead.bytes == sum(c.bytes for c in chunks) * layers / 9 / (1 if shard is None else 2)
    assert ahead.waits and all(wait.seconds() >= 0 for wait in ahead.waits)
