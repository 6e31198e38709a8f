"""`drive`: a pass over given calls counts whole or not at all, and what does not fit it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach import A3, MAC, Quest, SnapKV, StreamingLLM
from longreach.cache import KVCache
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.ops import RowRange
from longreach.runtime import Ledger, Pass, Segment, StateStore, drive
from tests.methods.drive import (
    KV_HEADS,
    LAYERS,
    MODEL,
    Turn,
    call_of,
    in_phase,
    new_cache,
    run,
    states_of,
    text,
)

QUEST = Quest(k=8, page=4, dense_layers=())
RING = MAC(window=40, band=3, tau=0.0, min_context=0)
WHOLE = text(30)


def begun(cache: KVCache, p: Pass, count: int = 1, slot: int = 0) -> Iterator[LayerCall]:
    """The calls of a pass over the next tokens of WHOLE in a slot, which is not committed."""
    step = cache.begin([slot], [count])
    for layer in range(LAYERS):
        cache.append(layer, step, WHOLE.k[layer, step.pos], WHOLE.v[layer, step.pos])
        yield call_of(cache, p, layer, step, WHOLE.q[layer, step.pos], WHOLE.k[layer, step.pos])


def new_pass(cache: KVCache, segment: Segment, ledger: Ledger | None = None) -> Pass:
    return Pass((segment,), MODEL, states_of(cache), ledger)


def test_nothing_of_a_pass_that_failed_is_counted() -> None:
    ledger, whole, cache = Ledger(), text(12), new_cache()

    def one_pass(layers: int) -> list[LayerCall]:
        step, p = cache.begin([0], [12]), Pass((Segment("prefill", Dense()),), MODEL, states_of(cache), ledger)

        def calls() -> Iterator[LayerCall]:
            for layer in range(layers):
                cache.append(layer, step, whole.k[layer], whole.v[layer])
                yield call_of(cache, p, layer, step, whole.q[layer], whole.k[layer])
            assert layers == LAYERS, "the engine fails"

        return [call for call, _ in drive(p, calls())]

    with pytest.raises(AssertionError, match="the engine fails"):
        one_pass(LAYERS - 1)
    assert ledger.report().layers == ()
    assert len(one_pass(LAYERS)) == LAYERS
    assert {(layer.steps, layer.rows) for layer in ledger.report().layers} == {(1, 12)}


def test_a_layer_attends_once_a_pass() -> None:
    ledger, cache = Ledger(), new_cache()
    p = new_pass(cache, Segment("prefill", Dense()), ledger)
    calls = list(begun(cache, p, 12))
    with pytest.raises(InvalidInput, match="layer 1 has attended in this pass already; make a Pass for each"):
        drive(p, [calls[0], calls[1], calls[1]])
    assert ledger.report().layers == ()
    p.restart()
    assert len(drive(p, calls)) == LAYERS
    assert {(layer.steps, layer.rows) for layer in ledger.report().layers} == {(1, 12)}


@pytest.mark.parametrize("window", [0, -3, 2.5, True, "4"], ids=repr)
def test_only_counts_are_windows(window: Any) -> None:
    cache = new_cache()
    p = new_pass(cache, Segment("prefill", Dense()))
    with pytest.raises(
        InvalidInput, match=rf"window: layer 1: expected a count of tokens >= 1, or None, got {window!r}"
    ):
        drive(p, begun(cache, p, 12), windows={1: window})


WRONG_SEGMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "a phase": (("prefil", Dense()), "phase: expected one of prefill, decode, got 'prefil'"),
    "no phase": ((None, Dense()), "phase: expected one of prefill, decode, got None"),
    "a name": (("decode", "quest"), "method: expected a configured attention method, such as Quest.*, got 'quest'"),
    "a class": (("decode", Quest), "method: expected a configured attention method.* got <class"),
    "a fusion method": (("prefill", A3()), "method: expected a configured attention method"),
    "a decode method": (("prefill", QUEST), "method: expected one for prefill, got quest, which is for decode alone"),
    "an observer's name": (("prefill", Dense(), ("quest",)), "observers: expected configured methods .* got 'quest'"),
}


@pytest.mark.parametrize(("given", "message"), WRONG_SEGMENTS.values(), ids=WRONG_SEGMENTS)
def test_segments_of_other_things_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Segment(*given)


@pytest.mark.parametrize(
    "segment",
    [
        Segment("decode", replace(QUEST, dense_layers=(LAYERS,))),
        Segment("prefill", Dense(), (SnapKV(), replace(QUEST, dense_layers=(LAYERS,)))),
    ],
    ids=["method", "observer"],
)
def test_methods_must_fit_the_model(segment: Segment) -> None:
    for _ in range(2):  # a refusal is not remembered as a method that fits
        with pytest.raises(InvalidInput, match="dense_layers"):
            Pass((segment,), MODEL)
    Pass((segment,), replace(MODEL, layers=LAYERS + 1))
    Pass((segment,))


@pytest.mark.parametrize("method", [QUEST, RING], ids=["quest", "mac"])
@pytest.mark.parametrize("on_host", [False, True], ids=["pos", "runs"])
def test_a_method_that_missed_tokens_is_refused(method: Any, on_host: bool) -> None:
    """It leaves no state behind: the cache goes on with another method, and keys can be evicted from it."""
    cache, ledger = new_cache(slots=2), Ledger()
    run(cache, in_phase(method, "prefill"), [Turn(WHOLE, 0, 12)])
    run(cache, Dense(), [Turn(WHOLE, 1, 12)])
    run(cache, method, [Turn(WHOLE, 0)])
    states, held = states_of(cache), states_of(cache).nbytes
    p = new_pass(cache, Segment("decode", method), ledger)
    calls = list(begun(cache, p, slot=1))
    if on_host:
        runs = (RowRange(1, 0, 12),)
        calls = [replace(call, rows=replace(call.rows, runs=runs)) for call in calls]
    with pytest.raises(InvalidInput, match=f"{method.name} .* holds 12 tokens of which it observed the first 0 only"):
        drive(p, calls)
    assert ledger.report().layers == () and states.nbytes == held
    fresh = new_cache()
    run(fresh, Dense(), [Turn(WHOLE, 0, 12)])
    p = new_pass(fresh, Segment("decode", method))
    with pytest.raises(InvalidInput, match="observed the first 0 only"):
        drive(p, begun(fresh, p))
    fresh.truncate([0], [12])
    assert states_of(fresh).states() == []
    for layer in range(LAYERS):
        fresh.keep(layer, [0], [torch.arange(5).expand(KV_HEADS, -1)])


def test_slots_on_a_device_are_not_read_to_find_missed_tokens() -> None:
    """There a method must have observed as many tokens of any sequence."""
    cache, store = new_cache(), StateStore(2)
    p = new_pass(cache, Segment("decode", QUEST))
    call = next(iter(begun(cache, p, 12)))
    call = replace(call, slots=torch.empty(1, dtype=torch.int64, device="meta"), phase="decode")

    def get(first: int | None) -> None:
        rows = replace(call.rows, runs=(RowRange(12, 0, first),))
        store.get(QUEST, replace(call, rows=rows, shared={}))

    get(None)
    store.mark_observed([QUEST], [1], [0], [7])
    get(7)
    with pytest.raises(InvalidInput, match="holds 8 tokens of which it observed the first 7 only"):
        get(8)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_mac_needs_the_rotation_of_the_rows(phase: Any) -> None:
    cache = new_cache()
    segment = Segment("decode", RING) if phase == "decode" else Segment("prefill", Dense(), (RING,))
    p = new_pass(cache, segment)
    with pytest.raises(InvalidInput, match=r"LayerCall.rotary is required: .* pass a function"):
        drive(p, (replace(call, rotary=None) for call in begun(cache, p)))


def test_keys_of_a_layer_with_a_window_are_not_evicted() -> None:
    """The refusal changes nothing: the layer goes on within its window. Other layers can be evicted from."""
    cache, some = new_cache(), torch.arange(5).expand(KV_HEADS, -1)
    run(cache, Dense(), [Turn(WHOLE, 0, 11)])
    p = new_pass(cache, Segment("decode", StreamingLLM(sinks=1, window=3)))
    done = drive(p, begun(cache, p), windows={1: 4})
    assert done[1][1].dense_reason == "sliding window of 4"
    run(cache, Dense(), [Turn(WHOLE, 0)])
    with pytest.raises(Unsupported, match=r"layer 1 attends to a sliding window of 4 tokens, .*; keep all keys of"):
        cache.keep(1, [0], [some])
    assert not cache.evicted(1) and cache.slots_in_use(1)[0] == 12
    cache.keep(0, [0], [some])
    p = new_pass(cache, Segment("decode", Dense()))
    assert drive(p, begun(cache, p), windows={1: 4})[0][0].evicted
