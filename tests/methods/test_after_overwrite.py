"""Decoding after keys were overwritten: the state of methods is that of the new keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from longreach import MAC, Kascade, Loki, MagicPIG, Quest
from longreach.cache import CacheConfig, KVCache
from longreach.errors import InvalidInput
from longreach.methods.base import AttentionMethod
from longreach.methods.dense import Dense
from longreach.methods.slots import LastRows
from longreach.methods.snapkv import SnapKV
from longreach.runtime import Pass, Segment, StateStore
from tests.methods.drive import (
    CACHES,
    LAYERS,
    MODEL,
    Text,
    Turn,
    call_of,
    in_phase,
    new_cache,
    outputs,
    run,
    states_of,
    text,
)

PROMPT, STEPS, SLOT = 60, 4, 1
OF_TOKENS = [
    Quest(k=8, page=4, dense_layers=()),
    Loki(k=6, rank=4),
    Kascade(k=5, min_keys=5, scoring="int8"),
    MagicPIG(bits=4, tables=9, local=8, seal=8, centre=8, dense_layers=()),
]
RING = MAC(window=40, band=3, tau=0.0, min_context=0)
POSITIONS = {"some": [20, 21, 37, 58], "to the end": list(range(30, PROMPT)), "all": list(range(PROMPT))}
each_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
each_set = pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)


def changed(whole: Text, positions: Sequence[int]) -> Text:
    """The text with other keys and values at these positions."""
    k, v, at = whole.k.clone(), whole.v.clone(), list(positions)
    k[:, at], v[:, at] = 3 * torch.randn_like(k[:, at]), 10 + torch.randn_like(v[:, at])
    return replace(whole, k=k, v=v)


def overwrite(cache: KVCache, whole: Text, positions: Sequence[int]) -> None:
    """A pass that writes keys and values over those of SLOT, and that no method sees; in two appends a layer."""
    step = cache.place([SLOT], [positions], overwrite=True)
    rows = torch.arange(len(positions)).flip(0)
    for layer in range(LAYERS):
        for some in rows.tensor_split(2):
            at = step.pos[some]
            cache.append(layer, step, whole.k[layer, at], whole.v[layer, at], rows=some)
    cache.commit(step)


def prompt(cache: KVCache, method: AttentionMethod, whole: Text, count: int = PROMPT) -> None:
    other = text(23, seed=9)
    run(cache, in_phase(method, "prefill"), [Turn(other, 0, 23), Turn(whole, SLOT, count)], phase="prefill")


def decoded(cache: KVCache, method: AttentionMethod, whole: Text) -> torch.Tensor:
    return outputs([run(cache, method, [Turn(whole, SLOT)]) for _ in range(STEPS)])


@pytest.mark.covering
@each_cache
@each_set
@pytest.mark.parametrize("method", OF_TOKENS, ids=repr)
def test_state_of_tokens_is_computed_again(
    method: AttentionMethod, positions: Sequence[int], config: CacheConfig
) -> None:
    torch.manual_seed(0)
    old = text(PROMPT + STEPS)
    new = changed(old, positions)
    cache, fresh = new_cache(config, slots=2), new_cache(config, slots=2)
    prompt(cache, method, old)
    overwrite(cache, new, positions)
    prompt(fresh, method, new)
    assert torch.equal(decoded(cache, method, new), decoded(fresh, method, new))


@pytest.mark.covering
@each_cache
@each_set
def test_results_over_old_keys_are_not_reused(positions: Sequence[int], config: CacheConfig) -> None:
    torch.manual_seed(0)
    old = text(PROMPT + STEPS)
    new = changed(old, positions)
    cache, short = new_cache(config, slots=2), new_cache(config, slots=2)
    prompt(cache, RING, old)
    overwrite(cache, new, positions)
    prompt(short, RING, new, positions[0])  # rows before the first overwritten token are still right
    run(short, Dense(), [Turn(new, SLOT, PROMPT - positions[0])], phase="prefill")
    for one in (cache, short):
        with pytest.raises(InvalidInput, match=f"holds 60 tokens of which it observed the first {positions[0]} only"):
            run(one, RING, [Turn(new, SLOT)])
        states_of(one).mark_observed([RING], [SLOT], [positions[0]], [PROMPT])  # with no row of them in the ring
    assert torch.equal(decoded(cache, RING, new), decoded(short, RING, new))


def test_queries_kept_for_eviction_end_before_the_first_overwritten_token() -> None:
    evict, whole, cache = SnapKV(window=16), text(PROMPT), new_cache(slots=2)
    step = cache.begin([0, SLOT], [PROMPT, PROMPT])
    q, k = whole.q[0].repeat(2, 1, 1), whole.k[0].repeat(2, 1, 1)
    for layer in range(LAYERS):
        cache.append(layer, step, k, k)
    call = call_of(cache, Pass((Segment("prefill", Dense()),), MODEL, states_of(cache)), 0, step, q, k)
    state = states_of(cache).get(evict, call)
    assert isinstance(state, LastRows)
    evict.observe_prompt(call, state)
    cache.commit(step)
    cache.place([SLOT], [[50, 52]], overwrite=True)
    pos = state.pos.tolist()
    assert [p for _, p in state.noted(pos[SLOT], PROMPT, 16)] == list(range(PROMPT - 16, 50))
    assert len(state.noted(pos[0], PROMPT, 16)) == 16


def test_what_counts_as_observed() -> None:
    """State of tokens follows; methods that keep state of sequences must observe again from the first token on."""
    quest, store = OF_TOKENS[0], StateStore(2)
    cache = KVCache(1, 2, state=store)
    k = torch.randn(20, 2, 16)
    step = cache.begin([0, 1], [10, 10])
    cache.append(0, step, k, k.clone())
    cache.commit(step)
    store.mark_observed([quest, RING], [0, 1], [0, 0], [10, 10])

    def replaced(positions: Sequence[int], first: int, methods: Sequence[AttentionMethod]) -> None:
        step = cache.place([1], [positions], overwrite=True)
        cache.append(0, step, k[: len(positions)], k[: len(positions)].clone())
        cache.commit(step)
        store.mark_observed(methods, [1], [first], cache.lengths[1:])

    replaced([4, 7], 10, [RING])
    store.check_observed(quest, [0, 1], cache.lengths)
    store.check_observed(RING, [0], cache.lengths[:1])
    with pytest.raises(InvalidInput, match="holds 10 tokens of which it observed the first 4 only"):
        store.check_observed(RING, [1], cache.lengths[1:])
    replaced(range(4, 12), 4, [RING, quest])
    for method in (quest, RING):
        store.check_observed(method, [0, 1], cache.lengths)
