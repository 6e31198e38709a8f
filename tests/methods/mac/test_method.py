"""MAC against itself spelled out: random sequences, ragged and paged, cut, reset and interleaved."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from longreach.cache import CacheConfig, KVCache
from longreach.errors import CapacityError, Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.mac import MAC
from longreach.methods.mac.state import LayerState
from longreach.ops import KVView
from longreach.runtime import StateStore
from longreach.testing.tolerance import assert_close
from tests.methods import drive
from tests.methods.drive import CACHES, LAYERS, Pass, Text, Turn, exact, in_phase, new_cache, read_text, run, text
from tests.methods.mac.spelled_out import SpelledOut
from tests.methods.metered import passes_of

BASE = MAC(window=12, band=3, tau=0.0, min_context=0, max_reuse_depth=None, rest_rows=None)
CONFIGS = {
    "plain": BASE,
    "sinks": replace(BASE, sinks=4),
    "depth": replace(BASE, max_reuse_depth=2),
    "tau": replace(BASE, tau=0.2),
    "guard": replace(BASE, tau=0.25, rest_rows=3),
    "minimum": replace(BASE, min_context=45),
    "gap": replace(BASE, window=30, max_gap=6),
    "all": replace(BASE, sinks=1, max_reuse_depth=3, tau=0.1, rest_rows=2, min_context=30, probe_every=5),
}


def close(got: torch.Tensor, want: torch.Tensor, error: float = 1e-9) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=error)


def states(cache: KVCache) -> list[LayerState]:
    assert isinstance(cache.state, StateStore)
    found = [s for s in cache.state.states() if isinstance(s, LayerState)]
    assert len(found) == LAYERS
    return found


@pytest.mark.covering
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_many_steps(name: str, config: CacheConfig) -> None:
    """Three sequences; two are decoded far past where their ring wraps, one is reset and its slot used again."""
    method = CONFIGS[name]
    spelled, cache = SpelledOut(method, 8), new_cache(config, slots=4)
    texts = {slot: text(n, seed=slot).to(torch.float64) for slot, n in ((3, 80), (0, 60), (2, 50))}
    length = {3: 33, 0: 2, 2: 20}
    run(cache, in_phase(method, "prefill"), [Turn(texts[s], s, n) for s, n in length.items()])
    for slot, n in length.items():
        spelled.read(slot, texts[slot], 0, n)
    for step in range(33):
        slots = [s for s in ([3, 0, 2], [0, 3], [2, 3, 0])[step % 3] if s != 2 or step < 22]
        turn = run(cache, method, [Turn(texts[s], s) for s in slots])
        for row, slot in enumerate(slots):
            close(turn.outs(row)[:, 0], spelled.decode(slot, texts[slot], length[slot]))
            length[slot] += 1
        if step == 14:
            cache.reset([0])
            spelled.forget(0)
            texts[0] = text(70, seed=9).to(torch.float64)
            run(cache, in_phase(method, "prefill"), [Turn(texts[0], 0, 30)])
            spelled.read(0, texts[0], 0, 30)
            length[0] = 30
    assert spelled.reused > 100
    assert (spelled.deepest > 3) == (name in ("plain", "sinks", "tau", "gap", "minimum", "guard"))
    if name == "guard":
        assert any(float(state.ring.credit.nan_to_num(0.0).min()) < 0 for state in states(cache))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
def test_the_kernels_decide_and_compute_alike() -> None:
    method = replace(CONFIGS["all"], min_context=0, rest_rows=None)
    spelled, cache = SpelledOut(method), new_cache(slots=2)
    whole = text(34, seed=4)
    run(cache, in_phase(method, "prefill"), [Turn(whole, 1, 28)], impl="reference")
    spelled.read(1, whole, 0, 28)
    for pos in range(28, 34):
        close(run(cache, method, [Turn(whole, 1)], impl="triton").outs(0)[:, 0], spelled.decode(1, whole, pos), 1e-5)
    assert spelled.reused > 20


def test_cut_and_failed_passes_leave_no_trace() -> None:
    """Up to eight tokens taken back, however often: as if they had never been."""
    method, whole = BASE, text(75, seed=2).to(torch.float64)
    spelled, cache = SpelledOut(method, 8), new_cache()
    run(cache, in_phase(method, "prefill"), [Turn(whole, 0, 30)])
    spelled.read(0, whole, 0, 30)

    def fails(call: LayerCall) -> None:
        if call.layer == 1:
            raise KeyboardInterrupt

    pos = 30
    other = text(75, seed=77).to(torch.float64)
    while pos < 60:
        with pytest.raises(KeyboardInterrupt):
            run(cache, method, [Turn(other, 0)], before=fails)
        if pos % 7 == 3:
            for _ in range(8):
                run(cache, method, [Turn(other, 0)])
            cache.truncate([0], [pos])
        close(run(cache, method, [Turn(whole, 0)]).outs(0)[:, 0], spelled.decode(0, whole, pos))
        pos += 1
    cache.truncate([0], [55])  # more than that: what fell out of the ring is not found, the rest is
    spelled.forget(0, 55)
    for state, brute in zip(states(cache), spelled.layers, strict=True):
        kept = {p for p in state.ring.stamp[0].tolist() if p >= 0}
        assert kept == set(range(47, 55))
        brute.seen[0] = {p: row for p, row in brute.seen[0].items() if p in kept}
    for pos in range(55, 74):
        close(run(cache, method, [Turn(whole, 0)]).outs(0)[:, 0], spelled.decode(0, whole, pos))


def test_a_slot_used_after_reset_matches_nothing_of_before() -> None:
    """The same text again: every row of before would be found at distance 0."""
    method, whole, cache = BASE, text(40, seed=1), new_cache()
    read_text(method, whole, steps=10, cache=cache)
    cache.reset([0])
    for state in states(cache):
        assert bool((state.ring.stamp == -1).all())
    read_text(method, whole, chunks=[2], steps=2, cache=cache)
    for state in states(cache):
        assert sorted(p for p in state.ring.stamp[0].tolist() if p >= 0) == [0, 1, 2, 3]


def same_query(length: int, logits: torch.Tensor) -> Text:
    """One query throughout; keys of these logits under it."""
    draw = torch.Generator().manual_seed(0)
    u = torch.nn.functional.normalize(torch.randn(drive.DIM, generator=draw), dim=0)
    q = u.expand(LAYERS, length, drive.HEADS, drive.DIM).contiguous()
    k = (logits[:length, None, None] * u / drive.SCALE).expand(LAYERS, length, drive.KV_HEADS, drive.DIM).contiguous()
    return Text(q, k, torch.randn(LAYERS, length, drive.KV_HEADS, drive.DIM, generator=draw))


def test_the_same_query_again_is_exact_over_150_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rotation an entry of the same query is exactly what the row would get: after 150 reuses one from another,
    under keys that the last ones outweigh by e^40, results err as dense attention in fp32 may and no more."""
    monkeypatch.setattr(drive, "FREQUENCIES", torch.zeros(drive.DIM // 2))
    method = replace(BASE, max_reuse_depth=None)
    whole = same_query(170, 6.0 + 40.0 * torch.arange(170) / 170)
    turns = read_text(method, whole, steps=150)[-150:]
    for turn in (*turns[:5], *turns[9::10]):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            assert_close(outcome.partial, exact(call))
    assert outcome.notes is not None
    assert float(outcome.notes.tensors[0][..., -1].min()) == 1.0, (
        "every entry of the last row descends from 32 and more"
    )


def test_nan_in_a_query_stays_with_its_row() -> None:
    """The row is NaN in the head that had it; rows after it are as if it had matched nothing."""
    method, whole = replace(BASE, sinks=2), text(60, seed=5)
    spoilt = Text(whole.q.clone(), whole.k, whole.v)
    spoilt.q[0, 35, 1] = torch.nan
    spoilt.q[2, 38] = torch.nan
    turns = read_text(method, spoilt, steps=40)[-40:]
    for pos, turn in enumerate(turns, 20):
        outs = turn.outs(0)[:, 0].isnan().any(-1)
        want = torch.zeros(LAYERS, drive.HEADS, dtype=torch.bool)
        if pos == 35:
            want[0, 1] = True
        if pos == 38:
            want[2] = True
        assert torch.equal(outs, want), pos
    found = turns[20].outcomes[0].notes
    assert found is not None and bool((found.tensors[0][..., 2] == 1).any()), "reuse goes on"


def test_past_the_capacity_nothing_is_noted() -> None:
    cache, whole = new_cache(CacheConfig(capacity=40)), text(60, seed=6)
    read_text(BASE, whole, chunks=[30], steps=10, cache=cache)
    before = [(s.ring.stamp.clone(), s.ring.query.nan_to_num(), s.entries.lse.nan_to_num()) for s in states(cache)]
    for _ in range(2):
        with pytest.raises(CapacityError):
            run(cache, BASE, [Turn(whole, 0)])
    for state, (stamp, query, lse) in zip(states(cache), before, strict=True):
        assert torch.equal(state.ring.stamp, stamp) and torch.equal(state.ring.query.nan_to_num(), query)
        assert torch.equal(state.entries.lse.nan_to_num(), lse)
    cache.truncate([0], [36])
    again = [run(cache, BASE, [Turn(whole, 0)]) for _ in range(4)]
    fresh = read_text(BASE, whole, chunks=[30], steps=10)
    for one, other in zip(again, fresh[-4:], strict=True):
        torch.testing.assert_close(one.outs(0), other.outs(0))


@pytest.mark.parametrize(
    "method",
    [
        replace(BASE, min_context=None),
        replace(BASE, min_context=1000),
        replace(BASE, band=1000),
        replace(BASE, sinks=1000),
        replace(BASE, tau=0.999),
    ],
    ids=repr,
)
def test_where_nothing_is_reused_it_is_dense(method: MAC) -> None:
    """Contexts below the minimum, bands and sinks wider than the context, nothing near enough."""
    length = 15 if method.min_context is None else 20
    for turn in read_text(method, text(length, seed=7), steps=8)[-8:]:
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            assert_close(outcome.partial, exact(call))
            assert outcome.notes is not None and not bool(outcome.notes.tensors[0][..., 2].any())


def test_what_a_search_pays() -> None:
    """Eq. 9 in keys: a window of 16 rows costs what its queries weigh in keys and values; the band comes on top."""
    cache = new_cache()
    read_text(replace(BASE, window=16, band=5, min_context=None), text(10), cache=cache)
    rule = states(cache)[0].rule
    bytes_of_a_row, bytes_of_a_key = 2 * (drive.DIM * 4 + 4), 2 * drive.DIM * 4
    assert rule.price == bytes_of_a_row / bytes_of_a_key and rule.min_context == 17 + 5


def test_several_new_tokens_at_once_are_attended_to_exactly() -> None:
    whole, cache = text(40, seed=8), new_cache()
    read_text(BASE, whole, chunks=[20], steps=3, cache=cache)
    turn = run(cache, BASE, [Turn(whole, 0, 5)], phase="decode")
    for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
        assert outcome.dense_reason == "several new tokens at once"
        assert_close(outcome.partial, exact(call))
        read = [sum(rows[n][0] for rows in passes_of(call, "key_bytes")) for n in range(5)]
        assert read == [pos + 1 + max(0, pos + 1 - BASE.band) for pos in range(23, 28)]
    spelled = SpelledOut(BASE)
    spelled.read(0, whole, 0, 20)
    for pos in range(20, 23):
        spelled.decode(0, whole, pos)
    spelled.read(0, whole, 23, 5)
    close(run(cache, BASE, [Turn(whole, 0)]).outs(0)[:, 0], spelled.decode(0, whole, 28), 1e-5)


def test_keys_that_entries_stand_for_are_not_evicted() -> None:
    """Once a layer has a ring, nothing of it is evicted: the refusal changes nothing, and decoding goes on."""
    spelled, cache, whole = SpelledOut(BASE), new_cache(), text(40, seed=8)
    run(cache, in_phase(BASE, "prefill"), [Turn(whole, 0, 20)])
    spelled.read(0, whole, 0, 20)
    close(run(cache, BASE, [Turn(whole, 0)]).outs(0)[:, 0], spelled.decode(0, whole, 20), 1e-5)
    some = torch.arange(9).expand(drive.KV_HEADS, -1)
    for layer in range(LAYERS):
        with pytest.raises(Unsupported, match=rf"layer {layer} keeps results of attention .* layers without a ring"):
            cache.keep(layer, [0], [some])
        assert not cache.evicted(layer) and cache.slots_in_use(layer) == [21]
    for pos in range(21, 25):
        close(run(cache, BASE, [Turn(whole, 0)]).outs(0)[:, 0], spelled.decode(0, whole, pos), 1e-5)
    assert spelled.reused > 0


def test_after_eviction_it_refuses() -> None:
    """A prompt that was read densely, keys of which were dropped; the layers that kept theirs go on."""
    cache, whole = new_cache(), text(40, seed=8)
    run(cache, Dense(), [Turn(whole, 0, 20)])
    drive.states_of(cache).mark_observed([BASE], [0], [0], [20])  # with no row of them in a ring
    cache.keep(1, [0], [torch.arange(9).expand(drive.KV_HEADS, -1)])
    for method in (BASE, in_phase(BASE, "prefill")):
        with pytest.raises(Unsupported, match=r"mac: its entries hold attention over keys that were dropped"):
            run(cache, method, [Turn(whole, 0)])
        cache.truncate([0], [20])
    assert run(cache, Dense(), [Turn(whole, 0)]).calls[1].evicted


def test_a_forced_gap_is_taken() -> None:
    """For timing: every row goes on from the row so far back, whatever its query."""
    cache, whole = new_cache(), text(60, seed=3)
    read_text(replace(BASE, tau=0.9), whole, chunks=[30], steps=1, cache=cache)
    for state in states(cache):
        state.force(7)
    for pos in range(31, 45):
        turn: Pass = run(cache, replace(BASE, tau=0.9), [Turn(whole, 0)])
        for call in turn.calls:
            (selection,) = call.meter.keys
            start: Any = selection.spans[0].start.value  # type: ignore[attr-defined]
            assert start.tolist() == [[pos - 7 + 1 - 3] * drive.HEADS]


def test_memory_of_a_ring() -> None:
    """At most 4.8% of the keys and values of 128K tokens: bf16, 32 query heads, 8 KV heads, head dim 128, 1024 rows."""
    one = LayerState(1, 32, 8, 128, MAC().new_state(_wide_call(), 1).rule, None, torch.empty(0, dtype=torch.bfloat16))
    assert one.bytes_per_sequence <= 0.048 * 131072 * 8 * 128 * 2 * 2
    assert one.entries.out.dtype == torch.float32


def _wide_call() -> LayerCall:
    from longreach.ops import Rows

    kv = KVView(*(torch.zeros(1, 8, 16, 128, dtype=torch.bfloat16) for _ in range(2)), torch.tensor([1]))
    return LayerCall(0, Rows(torch.zeros(1, 32, 128).bfloat16(), *torch.zeros(2, 1).long()), kv, torch.tensor([0]), 1.0)
