"""A cache with layers in host memory holds and shows the same keys as one in device memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longreach.cache import Append, CacheConfig, KVCache, kv, tiers
from longreach.errors import CapacityError, Unsupported
from longreach.ops import RotaryAngles
from tests.cache.drive import DIM, HEADS, Snapshot, Tokens, fill, held, joined, random_kept, random_tokens, same, write

LAYERS, SLOTS = 4, 3
LAYER = 2 * SLOTS * HEADS * 256 * DIM * 4  # bytes at the first size


def caches(*, resident: tuple[int, ...] = (), **options: int) -> tuple[KVCache, KVCache]:
    """Two caches, in host memory and plain."""
    config = CacheConfig(host=True, **options)  # type: ignore[arg-type]
    return KVCache(LAYERS, SLOTS, config, resident=resident), KVCache(LAYERS, SLOTS)


def both(a: KVCache, b: KVCache, run: Callable[[KVCache], Append], commit: bool = True) -> tuple[Append, Append]:
    """The same pass on both, with the same tokens; views are compared before it ends."""
    steps = []
    for cache in (a, b):
        torch.manual_seed(len(a.lengths) + sum(b.lengths))
        step = run(cache)
        write(cache, step)
        steps.append(step)
    for layer in (*range(LAYERS), 0, 2, 1):  # also in another order than they were written in
        assert same([visible(a, layer, steps[0])], [visible(b, layer, steps[1])])
    for cache, step in zip((a, b), steps, strict=True):
        cache.commit(step) if commit else cache.abort(step)
    return steps[0], steps[1]


def visible(cache: KVCache, layer: int, step: Append) -> Tokens:
    """All that a view of the pass shows, sequence after sequence."""
    view = cache.view(layer, step)
    seq = torch.repeat_interleave(torch.arange(len(step.counts)), view.seq_lens)
    slot = torch.cat([torch.arange(int(n)) for n in view.seq_lens])
    page, offset = view.locate(seq, slot)
    return view.k[page, :, offset], view.v[page, :, offset]


def staged(cache: KVCache, layer: int, step: Append) -> bool:
    pair = cache.memory[layer]
    assert pair is not None
    return cache.view(layer, step).k.data_ptr() != pair[0].data_ptr()


@pytest.mark.parametrize("resident", [(), (1,), (0, 3)])
def test_passes_of_any_length_see_the_same_keys(resident: tuple[int, ...]) -> None:
    host, plain = caches(resident=resident)
    for slots, counts in (
        ([0, 1, 2], [40, 3, 17]),  # all layers are staged, and hold nothing yet
        ([0, 1, 2], [1, 1, 1]),
        ([2, 0], [9, 30]),
        ([1], [12]),
        ([0, 1, 2], [2, 0, 8]),
        ([0, 1, 2], [1, 260, 1]),  # memory grows
        ([0, 1, 2], [20, 20, 20]),
    ):
        both(host, plain, lambda cache: cache.begin(slots, counts))  # noqa: B023
    assert host.lengths == plain.lengths and host.nbytes == plain.nbytes
    assert host.in_host == set(range(LAYERS)) - set(resident)
    for slot in range(SLOTS):
        assert same(held(host, slot), held(plain, slot))


def test_cut_sequences_and_failed_passes_leave_the_same_keys() -> None:
    host, plain = caches()
    both(host, plain, lambda cache: cache.begin([0, 1, 2], [50, 20, 33]))
    both(host, plain, lambda cache: cache.begin([0, 2], [12, 30]), commit=False)
    for cache in (host, plain):
        cache.truncate([0, 1], [31, 2])
        cache.reset([2])
    both(host, plain, lambda cache: cache.begin([2, 1, 0], [18, 11, 9]))
    both(host, plain, lambda cache: cache.place([0, 1], [[3, 5, *range(10, 24)], range(0, 13)], overwrite=True))
    both(host, plain, lambda cache: cache.place([1], [range(4, 20)], overwrite=True), commit=False)
    assert host.lengths == plain.lengths
    for slot in range(SLOTS):
        assert same(held(host, slot), held(plain, slot))


def test_rows_written_in_parts_and_rotated_arrive_in_both_memories() -> None:
    host, plain = caches()
    half = torch.randn(20, DIM // 2).double()
    angles = RotaryAngles(half.cos(), half.sin(), "half")
    tokens = [(random_tokens(20), random_tokens(10)) for _ in range(LAYERS)]
    for cache in (host, plain):
        step = cache.begin([0, 1], [30, 0])
        for layer, (first, rest) in enumerate(tokens):
            cache.append(layer, step, *first, rows=torch.arange(5, 25), angles=angles)
            others = torch.tensor([*range(5), *range(25, 30)])
            cache.append(layer, step, *rest, rows=others)
            assert cache is plain or staged(cache, layer, step)
        if cache is host:
            shown = [visible(host, layer, step) for layer in range(LAYERS)]
        cache.commit(step)
    assert same(shown, held(plain, 0)) and same(held(host, 0), held(plain, 0))


def test_passes_of_few_rows_read_host_memory_in_place() -> None:
    host, _ = caches()
    fill(host, [0, 1], [40, 3])
    few, many = [kv.IN_PLACE, 1], [kv.IN_PLACE + 1, 1]
    for counts, copied in ((few, False), (many, True)):
        step = host.begin([0, 1], counts)
        write(host, step)
        assert [staged(host, layer, step) for layer in range(LAYERS)] == [copied] * LAYERS
        host.commit(step)
        assert not host._staging._buffers, "staging is given back at the end of a pass"


def test_two_layers_are_staged_at_a_time_and_the_next_one_early() -> None:
    host, _ = caches(resident=(2,))
    fill(host, [0], [40])
    step = host.begin([0], [10])
    names = []
    for layer in range(LAYERS):
        host.append(layer, step, *random_tokens(10))
        names.append(sorted(buffer.name for buffer in host._staging._buffers))
    assert names == [[(step.number, a), (step.number, b)] for a, b in ((0, 1), (1, 3), (1, 3), (1, 3))]
    host.commit(step)


def test_passes_over_different_slots_may_overlap() -> None:
    host, plain = caches()
    tokens, shown = [random_tokens(12) for _ in range(2 * LAYERS)], list[list[Tokens]]()
    for cache in (host, plain):
        torch.manual_seed(0)
        fill(cache, [0, 1], [30, 25])
        first, second = cache.begin([0], [12]), cache.begin([1], [12])
        for layer in range(LAYERS):
            cache.append(layer, first, *tokens[layer])
            cache.append(layer, second, *tokens[LAYERS + layer])
        shown.append([visible(cache, layer, step) for step in (first, second) for layer in range(LAYERS)])
    assert same(*shown)


def test_layers_move_to_host_memory_as_they_grow_past_the_limit() -> None:
    host, plain = caches(device_bytes=4 * LAYER, resident=(3,))
    both(host, plain, lambda cache: cache.begin([0, 1, 2], [200, 100, 30]))
    assert host.in_host == set() and host.memory_use.staging_bytes == 0
    both(host, plain, lambda cache: cache.begin([0], [100]))
    use = host.memory_use
    assert use.host_layers == (0, 1, 2, 3) and use.staging_bytes == 4 * LAYER and use.device_bytes == 0
    assert host.nbytes == use.host_bytes == 8 * LAYER
    host, plain = caches(device_bytes=5 * LAYER + LAYER // 2, resident=(3,), capacity=384)
    both(host, plain, lambda cache: cache.begin([0], [300]))
    assert host.memory_use.device_layers == (3,) and host.memory_use.host_bytes == 3 * LAYER * 3 // 2


def test_a_limit_that_no_staging_fits_in_is_refused_with_nothing_written() -> None:
    host = KVCache(LAYERS, SLOTS, CacheConfig(host=True, device_bytes=LAYER))
    step = host.begin([0], [20])
    with pytest.raises(CapacityError, match="staging"):
        host.append(0, step, *random_tokens(20))
    host.abort(step)
    assert not any(host.memory) and host.lengths == [0] * SLOTS
    host = KVCache(LAYERS, SLOTS, CacheConfig(host=True, device_bytes=3 * LAYER))
    want = fill(host, [0], [200])
    before = Snapshot(host)
    with pytest.raises(CapacityError, match="to at least"):
        host.begin([0], [100])  # layers of twice the size
    assert before.unchanged(host) and same(held(host, 0), want[0])


def test_too_little_host_memory_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = caches()
    want = fill(host, [0], [200])
    before = Snapshot(host)
    monkeypatch.setattr("longreach.cache.host.available_bytes", lambda: LAYER)
    with pytest.raises(CapacityError, match=r"of host memory, and .* are free; nothing was written"):
        host.begin([0], [100])
    assert before.unchanged(host)
    monkeypatch.undo()
    assert same(held(host, 0), want[0])
    more = fill(host, [0], [100])
    assert same(held(host, 0), joined(want[0], more[0]))


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_growth_that_fails_half_way_loses_nothing(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = caches(resident=(1,))
    want = fill(host, [0, 1], [200, 12])
    plain, calls = tiers.allocate, [0]

    def failing(*args: object) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == fails_at:
            raise CapacityError("could not be pinned")
        return plain(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "allocate", failing)
        with pytest.raises(CapacityError, match="pinned"):
            host.begin([0], [100])
    assert host.lengths == [200, 12, 0] and host.in_host == {0, 2, 3}
    for slot in (0, 1):
        assert same(held(host, slot), want[slot])
    more = fill(host, [0], [100])
    assert same(held(host, 0), joined(want[0], more[0]))


def test_growth_stays_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that must leave device memory go before the others grow."""
    layers, limit = 8, 10 * LAYER
    cache = KVCache(layers, SLOTS, CacheConfig(host=True, device_bytes=limit))
    first = fill(cache, [0, 1, 2], [200, 30, 1])
    assert not cache.in_host
    plain, used = cache.memory._empty, list[int]()

    def watched(layer: int, *given: object) -> tuple[torch.Tensor, torch.Tensor]:
        made = plain(layer, *given)  # type: ignore[arg-type]
        new = 0 if layer in cache.memory._tiers.host else sum(x.nbytes for x in made)
        used.append(new + cache.memory_use.device_bytes)
        return made

    monkeypatch.setattr(cache.memory, "_empty", watched)
    more = fill(cache, [0], [200])
    assert cache.memory_use.device_layers == (0, 1, 2) and len(used) == layers
    assert max(used) <= limit
    assert same(held(cache, 0), joined(first[0], more[0])) and same(held(cache, 1), first[1])


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_first_pass_that_finds_no_memory_gives_all_back(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = caches()
    plain, calls = tiers.allocate, [0]

    def failing(*args: object) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == fails_at:
            raise CapacityError("could not be pinned")
        return plain(*args)  # type: ignore[arg-type]

    step = host.begin([0], [20])
    with monkeypatch.context() as patched:
        patched.setattr(tiers, "allocate", failing)
        with pytest.raises(CapacityError, match="pinned"):
            write(host, step)
    host.abort(step)
    assert not any(host.memory) and not host.in_host and not host.nbytes and host.lengths == [0] * SLOTS
    want = fill(host, [0], [12])
    assert same(held(host, 0), want[0])


def test_keys_in_host_memory_cannot_be_evicted() -> None:
    host, _ = caches(resident=(0,))
    fill(host, [0], [20])
    before = Snapshot(host)
    for layer in (0, 1):
        with pytest.raises(Unsupported, match=r"keys in host memory cannot be evicted; use CacheConfig\(host=False\)"):
            host.keep(layer, [0], [random_kept(20, 4)])
    assert before.unchanged(host)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_staging_on_a_gpu_is_in_order_with_kernels() -> None:
    """Passes whose copies take longer than the launches around them."""
    shape, counts = (2, 64), [[20_000, 9000], [300, 40], [12, 3000], [1, 1], [4000, 4000]]
    device, config = torch.device("cuda", 0), CacheConfig(host=True, capacity=40_000)
    host, plain = (KVCache(6, 2, c, device, resident=(2,)) for c in (config, CacheConfig(capacity=40_000)))
    for each in counts:
        steps = host.begin([0, 1], each), plain.begin([0, 1], each)
        for layer in range(6):
            k, v = torch.randn(2, sum(each), *shape, device=device, dtype=torch.bfloat16)
            views = []
            for cache, step in zip((host, plain), steps, strict=True):
                cache.append(layer, step, k, v)
                views.append(cache.view(layer, step))
            for seq, more in enumerate(each):
                n = host.lengths[seq] + more
                a, b = ((view.k[seq, :, :n].clone(), view.v[seq, :, :n].clone()) for view in views)
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for cache, step in zip((host, plain), steps, strict=True):
            cache.commit(step)
    assert host.in_host == {0, 1, 3, 4, 5} and host.lengths == plain.lengths
