"""The k best keys, against a plain search in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.dense import Dense
from longreach.methods.oracle_top_k import OracleTopK
from longreach.ops import HeadShard, Lists
from longreach.testing.tolerance import assert_close
from tests.methods import one_layer
from tests.methods.drive import (
    CACHES,
    DIM,
    HEADS,
    KV_HEADS,
    Text,
    Turn,
    exact,
    new_cache,
    read_text,
    run,
    shares,
    text,
)
from tests.methods.one_layer import Layers


def chosen(call: LayerCall, row: int, head: int) -> list[int]:
    """Slots of the list a row uses, in ascending order."""
    lists = call.meter.values[-1]
    assert isinstance(lists, Lists)
    head = min(head, lists.index.shape[1] - 1)
    return lists.index[row, head, : int(lists.count[row, head])].tolist()


def best(scores: Tensor, count: int) -> list[int]:
    """The best slots, the older first among equals, in ascending order."""
    return sorted(sorted(range(scores.shape[0]), key=lambda n: (-float(scores[n]), n))[:count])


def keys_of(k: int | float, context: int) -> int:
    return min(k, context) if isinstance(k, int) else max(1, math.ceil(k * context - 1e-9))


@pytest.mark.covering
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("heads", ["kv", "all"])
@pytest.mark.parametrize("k", [1, 6, 1000, 0.01, 0.1, 0.37, 1.0])
def test_the_best_keys_are_chosen(k: int | float, heads: Any, config: CacheConfig) -> None:
    """Soft-capped and sink-bearing layers too, ragged, k larger than the context included."""
    cache = new_cache(config, slots=2)
    texts = [text(n, seed=n) for n in (27, 6)]
    run(cache, Dense(), [Turn(texts[0], 1, 26), Turn(texts[1], 0, 2)])
    turn = run(cache, OracleTopK(k=k, heads=heads), [Turn(texts[1], 0, 3), Turn(texts[0], 1, 1)], phase="decode")
    for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
        pooled = shares(call).unflatten(1, (KV_HEADS, -1)).sum(2)
        if heads == "all":
            pooled = pooled.sum(1, keepdim=True).expand(-1, KV_HEADS, -1)
        for row, pos in enumerate(call.rows.pos.tolist()):
            for head in range(KV_HEADS):
                want = best(pooled[row, head, : pos + 1], keys_of(k, pos + 1))
                assert chosen(call, row, head) == want
        assert_close(outcome.partial, exact(call, call.meter.values[-1]))


def test_a_sink_changes_what_is_best() -> None:
    """It takes more from one head of the group than from the other, and so the pool is another."""
    plain = read_text(OracleTopK(k=4), text(40, seed=3))[-1].calls[0]
    sunk = replace(plain.observer(), sink_logit=torch.tensor([30.0, -30.0, -30.0, 30.0]))
    OracleTopK(k=4).run(sunk, None)
    assert [chosen(sunk, 0, g) for g in (0, 1)] != [chosen(plain, 0, g) for g in (0, 1)]
    alone = shares(plain)[0]
    assert [chosen(sunk, 0, g) for g in (0, 1)] == [best(alone[1], 4), best(alone[2], 4)]


@pytest.mark.parametrize("config", [CacheConfig(capacity=64), CacheConfig(capacity=500), CacheConfig("paged", page=3)])
def test_ties_go_to_the_older_key(config: CacheConfig) -> None:
    flat = text(30)
    flat = Text(torch.zeros_like(flat.q), flat.k, flat.v)  # all logits are 0
    for call in read_text(OracleTopK(k=7), flat, cache=new_cache(config))[-1].calls:
        assert [chosen(call, 0, head) for head in range(KV_HEADS)] == [list(range(7))] * KV_HEADS


def test_one_set_for_all_heads() -> None:
    call = read_text(OracleTopK(k=5, heads="all"), text(40))[-1].calls[0]
    lists = call.meter.values[-1]
    assert isinstance(lists, Lists) and lists.index.shape[1] == 1
    apart = read_text(OracleTopK(k=5), text(40))[-1].calls[0]
    assert chosen(apart, 0, 0) != chosen(apart, 0, 1)


def test_one_set_for_all_ranks() -> None:
    """Scores go over the ranks before anything is chosen: here the other rank wants slot 3 above all."""
    call = read_text(OracleTopK(), text(40))[-1].calls[0]
    wanted = torch.zeros(1, 1, call.kv.capacity)
    wanted[..., 3] = 100.0
    shard = HeadShard(0, KV_HEADS, 2 * KV_HEADS, lambda x: x + wanted)
    together, apart = (replace(call.observer(), shard=shard) for _ in range(2))
    OracleTopK(k=1, heads="all").run(together, None)
    OracleTopK(k=1).run(apart, None)
    assert chosen(together, 0, 0) == [3] != chosen(apart, 0, 0)


def test_dense_layers_say_so() -> None:
    for turn in read_text(OracleTopK(k=2, dense_layers=(0, 2)), text(20)):
        reasons = [o.dense_reason for o in turn.outcomes]
        assert reasons == (
            ["in dense_layers", None, "in dense_layers"] if len(turn.calls[0].rows.pos) == 1 else [None] * 3
        )
        for layer in (0, 2):
            assert_close(turn.outcomes[layer].partial, exact(turn.calls[layer]))


def test_dense_layers_must_be_the_models() -> None:
    model = ModelShape(layers=3, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    OracleTopK(dense_layers=(2, 0)).check(model)
    with pytest.raises(InvalidInput, match=r"dense_layers: .* has 3 \(0 to 2\), got layer 3"):
        OracleTopK(dense_layers=(0, 3)).check(model)


def test_what_it_reads() -> None:
    """Keys twice to score them, then those chosen; values of those chosen, and all of them where a sink asks for it."""
    last = read_text(OracleTopK(k=5), text(40))[-1]

    def counts(call: LayerCall, selections: Any) -> list[int]:
        return [int(s.keys_read(call.rows, call.kv)[0, 0]) for s in selections]

    for layer, values in enumerate(([5], [5], [40, 5])):
        call, reads = last.calls[layer], last.calls[layer].meter
        assert counts(call, reads.keys) == [40, 40, 5] and counts(call, reads.values) == values


@pytest.mark.covering
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("k", [4, 0.5])
def test_after_eviction_the_best_of_the_kept_keys_are_chosen(k: int | float, config: CacheConfig, impl: str) -> None:
    """Other keys in each head; a fraction is of those that are left. One set for all heads would name other keys."""
    if impl == "triton":
        pytest.importorskip("triton")
    layers = Layers(OracleTopK(k=k), config=config)
    layers.read([2, 0], [40, 20])
    layers.keep(0, 2, 13)
    layers.keep(0, 0, 6)
    layers.read([1], [8])
    for step in range(4):
        ((call, _),) = layers.decode([0, 1, 2])
        call = replace(call.observer(), impl=impl)
        outcome = OracleTopK(k=k).run(call, None)
        assert call.evicted and call.rows.pos.tolist() == [6 + step, 8 + step, 13 + step]
        for row, pos in enumerate(call.rows.pos.tolist()):
            pooled = one_layer.probabilities_of(call, row).unflatten(0, (2, -1)).sum(1)
            for head in range(2):
                assert chosen(call, row, head) == best(pooled[head], keys_of(k, pos + 1))
        assert_close(outcome.partial, one_layer.exact(call))
    with pytest.raises(Unsupported, match=r"oracle_top_k: after eviction .* heads='all' chooses one set"):
        OracleTopK(k=k, heads="all").run(call, None)
