"""Hash tables that grow with a sequence, and follow what a cache does to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import CacheConfig, MagicPIG
from longreach.cache import KVCache
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.magicpig import state as state_module
from longreach.methods.magicpig.state import LayerTables
from longreach.ops import Lists
from longreach.ops.doors import Later
from longreach.ops.simhash import HashTables
from tests.methods.drive import Pass, Text, Turn, in_phase, new_cache, outputs, read_text, run, states_of, text
from tests.methods.magicpig.plain import sealed
from tests.methods.one_layer import CACHES, Layers
from tests.methods.test_after_keep import Static
from tests.ops.attend.kernels import needs_gpu

METHOD = MagicPIG(bits=4, tables=9, local=8, seal=8, centre=28, dense_layers=())
each_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)


def prompt(cache: KVCache, whole: Text, count: int, slot: int = 0, method: MagicPIG = METHOD) -> Pass:
    return run(cache, in_phase(method, "prefill"), [Turn(whole, slot, count)], phase="prefill")


def decode(cache: KVCache, whole: Text, steps: int, slot: int = 0, impl: str = "auto") -> Tensor:
    return outputs([run(cache, METHOD, [Turn(whole, slot)], phase="decode", impl=impl) for _ in range(steps)])


def tables_of(cache: KVCache, method: MagicPIG = METHOD) -> list[LayerTables]:
    found = states_of(cache).states((method,))
    assert all(isinstance(state, LayerTables) for state in found)
    return found  # type: ignore[return-value]


def alike(a: HashTables, b: HashTables, slot: int, end: int) -> bool:
    """Whether two tables of one segment hold the same keys of a sequence, those up to `end`."""
    if end <= a.first:
        return True
    edges = torch.equal(a.offsets[slot].int(), b.offsets[slot].int())
    entries = end - a.first
    return edges and torch.equal(a.ids[slot, :, :, :entries].int(), b.ids[slot, :, :, :entries].int())


@each_cache
@pytest.mark.parametrize("cut", [100, 60, 41, 20, 5, 1])
def test_truncation(cut: int, config: CacheConfig) -> None:
    """Across the ends of blocks, and back to where there were none: as if the rest had never been."""
    whole, cache, fresh = text(130, seed=1), new_cache(config), new_cache(config)
    prompt(cache, whole, 90)
    decode(cache, whole, 14)
    cache.truncate([0], [cut])
    assert all(int(s.tables.stop[0]) == sealed(METHOD, cut, layer) for layer, s in enumerate(tables_of(cache)))
    prompt(fresh, whole, cut)
    found, want = decode(cache, whole, 12), decode(fresh, whole, 12)
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
    for one, other in zip(tables_of(cache), tables_of(fresh), strict=True):
        assert torch.equal(one.tables.stop, other.tables.stop)
        assert alike(one.tables, other.tables, 0, int(one.tables.stop[0]))
        assert int(one.tables.stop[0]) == METHOD.sinks or torch.equal(one.centre, other.centre)


def test_a_slot_begins_anew() -> None:
    cache = new_cache()
    prompt(cache, text(80, seed=1), 70)
    decode(cache, text(80, seed=1), 2)
    cache.reset([0])
    assert all(state.tables.stop.tolist() == [METHOD.sinks] for state in tables_of(cache))
    other = text(60, seed=2)
    torch.testing.assert_close(outputs(read_text(METHOD, other, cache=cache)), outputs(read_text(METHOD, other)))


@each_cache
def test_further_prompts(config: CacheConfig) -> None:
    """Decoding between prompts changes nothing in the tables, nor does decoding without having observed."""
    whole, cache, straight, late = text(140, seed=3), *(new_cache(config) for _ in range(3))
    prompt(cache, whole, 40)
    decode(cache, whole, 9)
    prompt(cache, whole, 60)
    prompt(straight, whole, 109)
    run(late, Dense(), [Turn(whole, 0, 109)], phase="prefill")
    states_of(late).mark_observed([METHOD], [0], [0], [109])  # else it would be refused
    want = decode(straight, whole, 10)
    for other in (cache, late):
        torch.testing.assert_close(decode(other, whole, 10), want, rtol=0, atol=2e-5)


@each_cache
def test_generation_has_no_length_limit(config: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a prompt of one token on, past segments and doublings of the memory."""
    monkeypatch.setattr(state_module, "SEGMENT", 64)
    layers = Layers(METHOD, slots=2, config=config)
    layers.read([1], [1])
    sampled = 0
    for n in range(1, 700):
        ((call, outcome),) = layers.decode([1])
        state = layers.state()
        assert isinstance(state, LayerTables)
        empty = sealed(METHOD, n) == METHOD.sinks
        assert int(state.tables.stop[1]) == sealed(METHOD, n) and bool(outcome.dense_reason) == empty
        sampled += 0 if empty else int(call.meter.values[-1].count.sum())  # type: ignore[union-attr]
    assert sampled and state.capacity >= 700 and state.generation > 0
    assert state.nbytes == sum(x.nbytes for x in (*_tensors(state.tables), state.centre, state.projections))


def _tensors(tables: HashTables) -> list[Tensor]:
    assert tables.inverse_norms is not None
    return [tables.ids, tables.offsets, tables.stop, tables.inverse_norms]


def test_state_bytes() -> None:
    """They are known before anything is allocated, and grow with the capacity."""
    layers = Layers(METHOD, slots=3, config=CacheConfig(capacity=500), layers=2)
    layers.read([0], [20])
    declared = METHOD.state_bytes(layers.model, 3, 500, torch.float32)
    assert declared == layers.states.nbytes
    assert declared < METHOD.state_bytes(layers.model, 3, 1000, torch.float32)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, -torch.inf])
def test_bad_keys_do_not_poison_the_tables(bad: float) -> None:
    """The centre leaves them out, and rows of other sequences, and rows after truncation, never notice."""
    whole, clean, cache = text(100, seed=4), new_cache(slots=2), new_cache(slots=2)
    spoilt = Text(whole.q, whole.k.clone(), whole.v)
    spoilt.k[:, 20:23, 1] = bad
    for other, mine in ((clean, whole), (cache, spoilt)):
        prompt(other, whole, 50, slot=1)
        prompt(other, mine, 60)
    torch.testing.assert_close(decode(cache, whole, 5, slot=1), decode(clean, whole, 5, slot=1), rtol=0, atol=0)
    for state in tables_of(cache):
        assert bool(state.centre.isfinite().all())
    decode(cache, whole, 10)
    kept = text(100, seed=4)
    assert all(
        alike(a.tables, b.tables, 1, int(a.tables.stop[1]))
        for a, b in zip(tables_of(cache), tables_of(clean), strict=True)
    )
    for other in (cache, clean):
        other.truncate([0], [18])
        prompt(other, kept, 40)
    torch.testing.assert_close(decode(cache, kept, 5), decode(clean, kept, 5), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [0.0, torch.nan])
def test_bad_queries_do_not_poison_the_tables(bad: float) -> None:
    layers, other = (Layers(METHOD, slots=1, seed=6) for _ in range(2))
    for one in (layers, other):
        one.read([0], [60])
    q = layers.random(1, 4, 16)
    good, odd = other.decode([0], q=q)[0], layers.decode([0], q=torch.full_like(q, bad))[0]
    other.draw.set_state(layers.draw.get_state())
    assert bool(odd[1].partial.out.isnan().any()) == (bad != bad)
    lists = odd[0].meter.values[-1]
    assert isinstance(lists, Lists) and not bool(lists.log_weight[0, 0, : int(lists.count[0, 0])].isnan().any())  # type: ignore[index]
    assert torch.equal(good[0].kv.seq_lens, odd[0].kv.seq_lens)
    mine, theirs = layers.state(), other.state()
    assert isinstance(mine, LayerTables) and isinstance(theirs, LayerTables)
    assert mine.tables.stop.tolist() == theirs.tables.stop.tolist() == [sealed(METHOD, 60)] != [METHOD.sinks]
    assert alike(mine.tables, theirs.tables, 0, sealed(METHOD, 60)) and torch.equal(mine.centre, theirs.centre)


@each_cache
@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("method", [METHOD, replace(METHOD, redo=0.9)], ids=["plain", "redo"])
def test_steps_over_fixed_buffers(config: CacheConfig, captured: bool, method: MagicPIG) -> None:
    """Positions that are on the device only, as in a captured step; blocks enter the tables within it, and rows with
    large errors attend densely.
    """
    device, slots = "cuda" if captured else "cpu", [1, 0]
    texts, lengths = {1: text(80, seed=1).to(device), 0: text(70, seed=2).to(device)}, {1: 40, 0: 23}
    caches = [new_cache(config, slots=2, device=device) for _ in range(2)]
    for cache in caches:
        for slot in slots:
            prompt(cache, texts[slot], lengths[slot], slot, method)
    want = [run(caches[0], method, [Turn(texts[s], s) for s in slots], phase="decode") for _ in range(20)]
    static = Static(caches[1], method, slots, width=20 if config.kind == "paged" else 1)

    def tokens(n: int) -> Text:
        each = [Text(*(x[:, lengths[s] + n] for x in (texts[s].q, texts[s].k, texts[s].v))) for s in slots]
        return Text(*(torch.stack(x, 1) for x in zip(*((t.q, t.k, t.v) for t in each), strict=True)))

    before = [state.tables.stop.tolist() for state in tables_of(caches[1], method)]
    got = static.decode([tokens(n) for n in range(20)], captured)
    after = [state.tables.stop.tolist() for state in tables_of(caches[1], method)]
    assert all(a[slot] < b[slot] for a, b in zip(before, after, strict=True) for slot in slots)
    for mine, plain in zip(got, want, strict=True):
        torch.testing.assert_close(mine, torch.stack([o.partial.out for o in plain.outcomes]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_keys_are_sealed(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass fails, and the next one is what it would have been."""
    whole, cache, fresh = text(100, seed=7), new_cache(), new_cache()
    prompt(cache, whole, 63)
    prompt(fresh, whole, 63)
    decode(cache, whole, 1)
    decode(fresh, whole, 1)  # its token completes a block
    original, calls = LayerCall.op, [0]

    def fails(self: LayerCall, name: str, *given: Any, **options: Any) -> Any:
        calls[0] += name == "simhash_seal"
        if calls[0] < 2 or name != "simhash_seal":
            return original(self, name, *given, **options)
        if when == "after":  # in the second layer
            original(self, name, *given, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerCall, "op", fails)
    with pytest.raises(KeyboardInterrupt):
        decode(cache, whole, 1)
    monkeypatch.undo()
    step = cache.begin([0], [1])  # the unfinished pass counts as failed
    cache.abort(step)
    torch.testing.assert_close(decode(cache, whole, 20), decode(fresh, whole, 20), rtol=0, atol=2e-5)


def each_line(function: Callable[..., Any], act: Callable[[], Any]) -> Iterator[bool]:
    """Call `act` again and again, with a KeyboardInterrupt at the first line that `function` runs, at the second, and
    so on. Yields True after each interrupt, and False once `act` has ended without one.
    """
    interrupted, number = True, 0
    while interrupted:
        interrupted, left, number = False, number, number + 1

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal interrupted, left
            if frame.f_code is function.__code__ and event == "line":
                left -= 1
                if left < 0 and not interrupted:
                    interrupted = True
                    raise KeyboardInterrupt
            return trace if frame.f_code is function.__code__ else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act()
        except KeyboardInterrupt:
            assert interrupted
        finally:
            sys.settrace(before)
        yield interrupted


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_an_interrupt_within_a_build(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any line of it, between its writes to the tables too: later steps are those of an undisturbed run."""
    if impl == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(state_module, "SEGMENT", 40)  # the block enters the second one, which has keys
    build = import_module(f"longreach.ops.simhash.{impl}").build
    whole = text(100, seed=7)

    def start() -> KVCache:
        cache = new_cache()
        prompt(cache, whole, 63)
        decode(cache, whole, 1, impl=impl)  # its token completes a block
        return cache

    fresh, caches = start(), [start()]
    want = decode(fresh, whole, 6, impl=impl)
    for interrupted in each_line(build, lambda: decode(caches[-1], whole, 1, impl=impl)):
        if not interrupted:
            break
        cache = caches[-1]
        cache.abort(cache.begin([0], [1]))  # the unfinished pass counts as failed
        torch.testing.assert_close(decode(cache, whole, 6, impl=impl), want, rtol=0, atol=2e-5)
        for one, other in zip(tables_of(cache), tables_of(fresh), strict=True):
            assert torch.equal(one.tables.stop, other.tables.stop) and torch.equal(one.centre, other.centre)
        caches.append(start())
    assert len(caches) > (10 if impl == "reference" else 5)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_build_by_numba_of_some_tables_only(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while threads are started: some tables have the new keys, others do not."""
    numba = pytest.importorskip("longreach.ops.simhash.numba", exc_type=ImportError)
    whole, cache, fresh = text(100, seed=7), new_cache(), new_cache()
    for one in (cache, fresh):
        prompt(one, whole, 63)
        decode(one, whole, 1, impl="numba")
    original = numba.in_threads

    def interrupted(workers: int, kernel: Any, *args: Any) -> None:
        if kernel is not numba.kernels.build:
            return original(workers, kernel, *args)
        kernel(worker, 2, *args)  # every second table
        raise KeyboardInterrupt

    monkeypatch.setattr(numba, "in_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode(cache, whole, 1, impl="numba")
    monkeypatch.undo()
    cache.abort(cache.begin([0], [1]))
    found, want = (decode(one, whole, 20, impl="numba") for one in (cache, fresh))
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)


def test_reads_of_hashing_are_counted() -> None:
    """Keys of the first block and of the centre, then of each block; ids of the segment that are moved."""
    layers = Layers(METHOD, slots=1)
    layers.read([0], [39])
    found = []
    for _ in range(20):
        ((call, _),) = layers.decode([0])
        sealed = call.meter.noted[0].read.other
        assert isinstance(sealed, Later)
        found.append(int(sealed.now().sum()))
    key, table, directions = 2 * 16 * 4, 2 * 9 * 2, 9 * 4 * 16 * 2
    # with 40 tokens before, the first block: 28 keys for the centre, 4 beside the sinks; then one each token to 32
    first = [(28 + 4) * key, 8 * key + 4 * table, 8 * key + 12 * table, 8 * key + 20 * table]
    want = [0] * 20
    for step, amount in zip((1, 2, 3, 4), first, strict=True):
        want[step] = amount + directions
    for step, held in ((9, 28), (17, 36)):
        want[step] = 8 * key + held * table + directions
    assert found == want
