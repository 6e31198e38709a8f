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
from longreach.methods.base import LayerCall, ModelShape, Outcome
from longreach.methods.oracle_top_k import OracleTopK
from longreach.ops import HeadShard, Lists, Rows
from longreach.testing.inputs import random_kv
from longreach.testing.tolerance import assert_close
from tests.methods.drive import (
    CACHES,
    DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    Text,
    Turn,
    exact,
    new_cache,
    read_text,
    run,
    shares,
    text,
)


def chosen(outcome: Outcome, row: int, head: int) -> list[int]:
    """Slots of the list a row uses, in ascending order."""
    lists = outcome.reads.values[-1]
    assert isinstance(lists, Lists)
    head = min(head, lists.index.shape[1] - 1)
    return lists.index[row, head, : int(lists.count[row, head])].tolist()


def best(scores: Tensor, count: int) -> list[int]:
    """The best slots, the older first among equals, in ascending order."""
    return sorted(sorted(range(scores.shape[0]), key=lambda n: (-float(scores[n]), n))[:count])


def keys_of(k: int | float, context: int) -> int:
    return min(k, context) if isinstance(k, int) else max(1, math.ceil(k * context - 1e-9))


@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("heads", ["kv", "all"])
@pytest.mark.parametrize("k", [1, 6, 1000, 0.01, 0.1, 0.37, 1.0])
def test_the_best_keys_are_chosen(k: int | float, heads: Any, config: CacheConfig) -> None:
    """Soft-capped and sink-bearing layers too, ragged, k larger than the context included."""
    cache = new_cache(config, slots=2)
    texts = [text(n, seed=n) for n in (27, 6)]
    run(cache, OracleTopK(k=k, heads=heads), [Turn(texts[0], 1, 26), Turn(texts[1], 0, 2)])
    turn = run(cache, OracleTopK(k=k, heads=heads), [Turn(texts[1], 0, 3), Turn(texts[0], 1, 1)])
    for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
        pooled = shares(call).unflatten(1, (KV_HEADS, -1)).sum(2)
        if heads == "all":
            pooled = pooled.sum(1, keepdim=True).expand(-1, KV_HEADS, -1)
        for row, pos in enumerate(call.rows.pos.tolist()):
            for head in range(KV_HEADS):
                want = best(pooled[row, head, : pos + 1], keys_of(k, pos + 1))
                assert chosen(outcome, row, head) == want
        assert_close(outcome.partial, exact(call, outcome.reads.values[-1]))


def test_a_sink_changes_what_is_best() -> None:
    """It takes more from one head of the group than from the other, and so the pool is another."""
    whole = text(40, seed=3)
    call = read_text(OracleTopK(k=4), whole)[-1].calls[0]
    with_sink = replace(call, sink_logit=torch.tensor([30.0, -30.0, -30.0, 30.0]))
    plain, sunk = OracleTopK(k=4).run(call, None), OracleTopK(k=4).run(with_sink, None)
    assert [chosen(sunk, 0, g) for g in (0, 1)] != [chosen(plain, 0, g) for g in (0, 1)]
    alone = shares(call)[0]
    assert [chosen(sunk, 0, g) for g in (0, 1)] == [best(alone[1], 4), best(alone[2], 4)]


@pytest.mark.parametrize("config", [CacheConfig(capacity=64), CacheConfig(capacity=500), CacheConfig("paged", page=3)])
def test_ties_go_to_the_older_key(config: CacheConfig) -> None:
    flat = text(30)
    flat = Text(torch.zeros_like(flat.q), flat.k, flat.v)  # all logits are 0
    for outcome in read_text(OracleTopK(k=7), flat, cache=new_cache(config))[-1].outcomes:
        assert [chosen(outcome, 0, head) for head in range(KV_HEADS)] == [list(range(7))] * KV_HEADS


def test_one_set_for_all_heads() -> None:
    outcome = read_text(OracleTopK(k=5, heads="all"), text(40))[-1].outcomes[0]
    lists = outcome.reads.values[-1]
    assert isinstance(lists, Lists) and lists.index.shape[1] == 1
    apart = read_text(OracleTopK(k=5), text(40))[-1].outcomes[0]
    assert chosen(apart, 0, 0) != chosen(apart, 0, 1)


def test_one_set_for_all_ranks() -> None:
    """Scores go over the ranks before anything is chosen: here the other rank wants slot 3 above all."""
    call = read_text(OracleTopK(), text(40))[-1].calls[0]
    wanted = torch.zeros(1, 1, call.kv.capacity)
    wanted[..., 3] = 100.0
    shard = HeadShard(0, KV_HEADS, 2 * KV_HEADS, lambda x: x + wanted)
    assert chosen(OracleTopK(k=1, heads="all").run(replace(call, shard=shard), None), 0, 0) == [3]
    assert chosen(OracleTopK(k=1).run(replace(call, shard=shard), None), 0, 0) != [3]


def test_dense_layers_say_so() -> None:
    for turn in read_text(OracleTopK(k=2, dense_layers=(0, 2)), text(20)):
        reasons = [o.dense_because for o in turn.outcomes]
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
        return [int(s.reads(call.rows, call.kv)[0, 0]) for s in selections]

    for layer, values in enumerate(([5], [5], [40, 5])):
        call, reads = last.calls[layer], last.outcomes[layer].reads
        assert counts(call, reads.keys) == [40, 40, 5] and counts(call, reads.values) == values


def test_after_eviction_slots_are_not_positions() -> None:
    kv = random_kv([20], heads=KV_HEADS, dim=DIM, evicted=True)
    rows = Rows(torch.randn(1, HEADS, DIM), torch.tensor([0]), torch.tensor([25]))
    call = LayerCall(0, rows, kv, torch.tensor([0]), SCALE)
    outcome = OracleTopK(k=0.5).run(call, None)
    assert kv.slot_pos is not None
    for head in range(KV_HEADS):
        seen = (kv.slot_pos[0, head, :20] <= 25).nonzero()[:, 0]
        found = chosen(outcome, 0, head)
        assert set(found) <= set(seen.tolist()) and len(found) == math.ceil(len(seen) / 2) < 10
    assert_close(outcome.partial, exact(call, outcome.reads.values[-1]))
    with pytest.raises(Unsupported, match="heads='all'"):
        OracleTopK(heads="all").run(call, None)
