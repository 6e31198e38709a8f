"""The union of what heads choose, rank by rank, beside loops in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.errors import Unsupported
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.less_is_more import LessIsMore
from longreach.testing.tolerance import assert_close
from tests.methods.one_layer import CACHES, Layers, assert_halves_agree, chosen_by, exact, logits_of

every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)


def wanted(method: LessIsMore, call: LayerCall, row: int) -> list[int]:
    """The paper's set: recent keys, sinks, and the heads' best others, each head naming one in its turn."""
    x = logits_of(call, row)
    context = x.shape[1]
    k = min(method.k, context) if isinstance(method.k, int) else max(1, math.ceil(method.k * context - 1e-9))
    recent = k - math.floor(k * (1 - method.recent) + 1e-9)
    found = list(range(context - recent, context))
    found += [n for n in range(min(method.sinks, k - recent)) if n not in found]
    forced = {*range(min(method.sinks, context)), *range(context - recent, context)}
    ranked = [sorted((n for n in range(context) if n not in forced), key=lambda n, h=h: (-float(h[n]), n)) for h in x]
    for named in zip(*ranked, strict=True):  # every head's best, then every head's second, ...
        for n in named:
            if len(found) < k and n not in found:
                found.append(n)
    return sorted(found)


def check(method: LessIsMore, layers: Layers, slots: list[int]) -> None:
    """The first layer chooses, the others attend to that."""
    found = layers.decode(slots)
    assert found[0][1].dense_reason == "chooses for the layers after it"
    for row in range(len(slots)):
        want = wanted(method, found[0][0], row)
        for call, _ in found[1:]:
            assert all(chosen_by(call, row, head) == want for head in range(call.kv.heads))
    for call, outcome in found:
        assert_close(outcome.partial, exact(call))


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("k", [1, 3, 12, 0.1, 0.5, 1.0])
@every_cache
def test_the_union_is_cut_to_the_budget(group: int, k: Any, config: CacheConfig) -> None:
    """Ragged, in any order of slots: rows of a batch have unions of their own."""
    method = LessIsMore(k=k, layers=(0,))
    layers = Layers(method, group=group, layers=3, config=config)
    layers.read([2, 0], [37, 6])
    layers.read([1], [12])
    for slots in ([0, 1, 2], [2, 1], [1, 0]):
        check(method, layers, slots)


@pytest.mark.covering
@pytest.mark.parametrize("recent", [0.01, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("sinks", [0, 1, 4, 100])
def test_recent_keys_and_sinks_have_their_share(recent: float, sinks: int) -> None:
    for k in (1, 2, 4, 9, 30, 60):
        method = LessIsMore(k=k, recent=recent, sinks=sinks, layers=(0,))
        layers = Layers(method, layers=2)
        layers.read([0], [45])
        check(method, layers, [0])


def test_by_hand() -> None:
    """Two heads: the first names 9, 3, 5, the second 9, 7, 3. With a budget of 5: two recent keys, then 9, 3 and 7."""
    keys, q = torch.zeros(20, 1, 8), torch.zeros(1, 2, 8)
    for rank, (mine, theirs) in enumerate(((9, 9), (3, 7), (5, 3))):
        keys[mine, 0, 0], keys[theirs, 0, 1] = 5.0 - rank, 5.0 - rank
    q[0, 0, 0], q[0, 1, 1] = 1.0, 1.0
    layers = Layers(LessIsMore(k=5, sinks=0, layers=(0,)), heads=1, dim=8, layers=2)
    layers.read([0], [20], k=keys)
    found = layers.decode([0], q=q, k=torch.zeros(1, 1, 8))
    assert chosen_by(found[1][0], 0, 0) == [3, 7, 9, 19, 20]


def test_sinks_stay_when_a_small_budget_had_no_room_for_them() -> None:
    """What a short sequence of the batch lacks room for, the long one beside it and later steps have."""
    method = LessIsMore(k=0.2, sinks=4, layers=(0,))
    layers = Layers(method, layers=2, slots=2)
    layers.read([0, 1], [5, 60])
    lists = [[chosen_by(layers.decode([0, 1])[1][0], row, 0) for row in (0, 1)] for _ in range(3)]
    assert [len(short) for short, _ in lists] == [2, 2, 2]
    assert all({0, 1, 2, 3} < set(long) for _, long in lists)


def test_rows_of_a_batch_do_not_share_a_choice() -> None:
    layers = Layers(LessIsMore(k=6, sinks=0, layers=(0,)), layers=2, slots=2)
    layers.read([0, 1], [40, 40])
    _, (call, _) = layers.decode([0, 1])
    assert chosen_by(call, 0, 0) != chosen_by(call, 1, 0)


def test_heads_of_all_ranks_choose_together() -> None:
    """Each rank has the heads of one KV head, and is told of the other's."""
    method = LessIsMore(k=9, sinks=1, layers=(0,))
    assert_halves_agree(method, 2)


@every_cache
def test_cut_and_grown_again(config: CacheConfig) -> None:
    method = LessIsMore(k=7, layers=(0,))
    layers = Layers(method, layers=2, config=config)
    layers.read([0, 1], [41, 30])
    for length in (40, 17, 1):
        layers.cache.truncate([0], [length])
        layers.read([0], [6])
        check(method, layers, [1, 0])


@pytest.mark.parametrize(
    ("count", "layers"), [(32, (2, 13)), (80, (5, 32)), (36, (2, 14)), (12, (0, 4)), (3, (0, 1)), (1, (0,))]
)
def test_layers_of_other_depths(count: int, layers: tuple[int, ...]) -> None:
    assert LessIsMore().choosing_layers(ModelShape(count, 4, 2, 16)) == layers


def test_after_eviction_it_is_refused() -> None:
    layers = Layers(LessIsMore(k=5, layers=(0,)), layers=2)
    layers.read([0], [20])
    layers.keep(1, 0, 7)
    with pytest.raises(Unsupported, match=r"less_is_more: after eviction .* or do not evict"):
        layers.decode([0])
