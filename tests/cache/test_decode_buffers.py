"""Buffers of decode passes: what `begin` would say, step by step, in tensors that stay where they are."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longreach.cache import CacheConfig, DecodeBuffers, KVCache, StatelessOnTruncate
from longreach.errors import CapacityError, InvalidInput
from tests.cache.drive import fill, held, joined, random_kept, same, split, taken, write

CONFIGS = {"contiguous": CacheConfig(capacity=100), "paged": CacheConfig("paged", page=4, pages=80)}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
evictions = pytest.mark.parametrize("evicted", [(), (1,), (0, 2), (0, 1, 2)])


def made(config: CacheConfig, evicted: tuple[int, ...]) -> tuple[KVCache, dict[int, list[tuple[Tensor, Tensor]]]]:
    """Three layers, three sequences; other keys kept in each of the evicted layers."""
    cache = KVCache(3, 3, config)
    want = fill(cache, [0, 1, 2], [30, 17, 5])
    for layer in evicted:
        for slot, count in ((0, 3 + layer), (1, 12)):
            index = random_kept(cache.slots_in_use(layer)[slot], count)
            cache.keep(layer, [slot], [index])
            want[slot][layer] = taken(want[slot][layer], index)
    return cache, want


def tensors(buffers: DecodeBuffers) -> list[Tensor]:
    step = buffers.append
    each = [(p.slot, p.page, p.offset, p.seq_lens, p.table) for p in map(step.at, range(3))]
    return [step.slots, step.seq, step.pos, *(x for place in each for x in place)]


@configs
@evictions
def test_each_step_is_what_begin_says(config: CacheConfig, evicted: tuple[int, ...]) -> None:
    cache, want = made(config, evicted)
    buffers = DecodeBuffers(cache, [2, 0, 1], 25 if config.kind == "paged" else 1)
    addresses = [x.data_ptr() for x in tensors(buffers)]
    assert all(address % 16 == 0 for address in addresses), "kernels are compiled for aligned tensors"
    for steps in (20, 3):
        step = buffers.open(steps)
        for _ in range(steps):
            assert step.pos.tolist() == [cache.lengths[s] for s in (2, 0, 1)]
            for layer in range(3):
                place, used = step.at(layer), cache.slots_in_use(layer)
                assert place.slot.tolist() == [used[s] for s in (2, 0, 1)]
                assert place.seq_lens.tolist() == [used[s] + 1 for s in (2, 0, 1)]
                assert place.starts is None and [r.first for r in place.runs or ()] == [None] * 3
            for slot, tokens in split(step, write(cache, step)).items():
                want[slot] = joined(want[slot], tokens)
            buffers.advance()
            buffers.count()
        buffers.close()
        assert all(same(held(cache, slot), want[slot]) for slot in range(3))
    assert [x.data_ptr() for x in tensors(buffers)] == addresses and not any(x.is_inference() for x in tensors(buffers))


class Launches(TorchDispatchMode):
    """Counts what would be kernels on a GPU: all but views."""

    VIEWS = ("unsqueeze", "select", "slice", "view", "alias", "split", "detach", "expand", "as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if not name.startswith(self.VIEWS):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@configs
@evictions
def test_a_step_launches_as_little_however_many_layers_differ(config: CacheConfig, evicted: tuple[int, ...]) -> None:
    cache, _ = made(config, evicted)
    buffers = DecodeBuffers(cache, [0, 1, 2], 25 if config.kind == "paged" else 1)
    buffers.open(3)
    with Launches() as launches:
        buffers.advance()
    assert len(launches.names) == (5 if config.kind == "paged" else 1), launches.names


@configs
def test_layers_that_are_alike_share_a_placement(config: CacheConfig) -> None:
    for evicted, groups in (((), 1), ((1,), 2), ((0, 2), 3), ((0, 1, 2), 3)):
        cache, _ = made(config, evicted)
        step = DecodeBuffers(cache, [0, 1, 2], 25 if config.kind == "paged" else 1).append
        assert len({id(step.at(layer)) for layer in range(3)}) == groups


def test_capacity_and_width_in_tokens() -> None:
    cache, _ = made(CONFIGS["contiguous"], ())
    assert DecodeBuffers(cache, [0, 1], 1).capacity == 100
    cache.keep(0, [0, 1, 2], [random_kept(n, 4) for n in (30, 17, 5)])
    assert DecodeBuffers(cache, [0, 1], 1).capacity == 4 + 13, "layer 0 has room for 4 slots; sequence 1 dropped 13"
    cache, _ = made(CONFIGS["paged"], ())
    cache.keep(0, [0, 1], [random_kept(n, 4) for n in (30, 17)])
    buffers = DecodeBuffers(cache, [0, 1], 10)
    assert buffers.capacity == 40 and buffers.append.at(1).table.shape == (2, 10)
    assert buffers.append.at(0).table.shape == (2, 7), "40 tokens are at most 27 slots there"
    buffers.open(10)  # to the last slot of sequence 0
    with pytest.raises(InvalidInput, match="table: 11 pages do not fit into 10 columns"):
        buffers.open(11)
    with pytest.raises(CapacityError):
        buffers.open(10_000)


def test_buffers_are_void_once_memory_has_moved() -> None:
    class Moved(StatelessOnTruncate):
        generation = 0

    state = Moved()
    cache = KVCache(1, 2, CacheConfig("paged", page=4), state=state)
    fill(cache, [0, 1], [3, 4])
    buffers = DecodeBuffers(cache, [0, 1], 1000)
    buffers.open(300)  # memory grows here, but nothing was captured before
    buffers.close()
    assert buffers.valid
    buffers.open(2)
    buffers.close()
    buffers.open(3000)
    buffers.close()
    assert not buffers.valid
    with pytest.raises(InvalidInput, match="memory has moved since these buffers were made; make new ones"):
        buffers.open(1)
    buffers = DecodeBuffers(cache, [0, 1], 1000)
    cache.keep(0, [1], [random_kept(4, 2)])
    assert not buffers.valid
    buffers = DecodeBuffers(cache, [0, 1], 1000)
    state.generation = 1
    assert not buffers.valid
