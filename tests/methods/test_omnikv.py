"""Layers that choose for those after them, beside loops in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.omnikv import OmniKV
from longreach.ops import Lists
from longreach.testing.tolerance import assert_close
from tests.methods.metered import metadata_of
from tests.methods.one_layer import CACHES, Layers, assert_halves_agree, chosen_by, exact, highest, probabilities_of

every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)


def keys_of_budget(k: int | float, context: int) -> int:
    return min(k, context) if isinstance(k, int) else max(1, math.ceil(k * context - 1e-9))


def wanted(method: OmniKV, call: LayerCall, row: int) -> list[int]:
    """The newest key, and the others that some head of the filter layer gives the largest probabilities."""
    most = probabilities_of(call, row).amax(0)
    context = most.shape[0]
    return [*highest(most[:-1], keys_of_budget(method.k, context) - 1), context - 1]


def check(method: OmniKV, found: list[tuple[LayerCall, Outcome]], filters: tuple[int, ...]) -> None:
    for layer, (call, outcome) in enumerate(found):
        before = [n for n in filters if n < layer]
        assert_close(outcome.partial, exact(call))
        if layer in filters or not before:
            assert outcome.dense_reason
            continue
        assert outcome.dense_reason is None
        for row in range(call.rows.pos.shape[0]):
            want = wanted(method, found[before[-1]][0], row)
            assert all(chosen_by(call, row, head) == want for head in range(call.kv.heads))


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("k", [1, 5, 0.1, 0.4, 1.0])
@every_cache
def test_layers_attend_to_what_the_filter_before_them_chose(group: int, k: Any, config: CacheConfig) -> None:
    """Ragged, in any order of slots: rows of a batch have choices of their own."""
    method = OmniKV(k=k, layers=(1, 3))
    layers = Layers(method, group=group, layers=5, config=config)
    layers.read([2, 0], [37, 6])
    layers.read([1], [12])
    for slots in ([0, 1, 2], [2, 1], [1, 0]):
        check(method, layers.decode(slots), (1, 3))


@pytest.mark.parametrize("terms", [{"softcap": 5.0}, {"sink_logit": torch.tensor([3.0, -9.0, 0.0, 6.0])}], ids=list)
def test_other_logits(terms: dict[str, Any]) -> None:
    """A sink takes probability from its head alone, and so changes whose keys come first."""
    method = OmniKV(k=6, layers=(0,))
    layers = Layers(method, layers=2, **terms)
    layers.read([0], [40])
    found = layers.decode([0])
    check(method, found, (0,))
    plain = Layers(method, layers=2)
    plain.read([0], [40])
    assert chosen_by(plain.decode([0])[1][0], 0, 0) != chosen_by(found[1][0], 0, 0) or "softcap" in terms


def test_one_head_is_enough() -> None:
    """A key that one head of eight cares for comes before those that all heads care for a little."""
    keys, q = torch.zeros(40, 2, 8), torch.zeros(1, 8, 8)
    keys[:, :, 0], keys[7, 1, 1] = 0.1, 9.0
    q[:, :, 0], q[0, 6, 1] = 1.0, 9.0
    layers = Layers(OmniKV(k=2, layers=(0,)), group=4, dim=8, layers=2)
    layers.read([0], [40], k=keys)
    found = layers.decode([0], q=q)
    assert chosen_by(found[1][0], 0, 0) == [7, 40]


def test_ties_go_to_the_older_key_and_the_newest_is_always_there() -> None:
    layers = Layers(OmniKV(k=4, layers=(0,)), layers=2)
    layers.read([0], [30])
    found = layers.decode([0], q=torch.zeros(1, 4, 16))
    assert chosen_by(found[1][0], 0, 1) == [0, 1, 2, 30]


def test_heads_of_all_ranks_choose_together() -> None:
    """The choice of the whole, from its halves: each rank has the heads of one KV head, and is told of the other's."""
    method = OmniKV(k=5, layers=(0,))
    assert_halves_agree(method, 3)


@every_cache
def test_cut_and_grown_again(config: CacheConfig) -> None:
    method = OmniKV(k=6, layers=(0,))
    layers = Layers(method, layers=2, config=config)
    layers.read([0, 1], [41, 30])
    for length in (40, 17, 1):
        layers.cache.truncate([0], [length])
        layers.read([0], [6])
        check(method, layers.decode([1, 0]), (0,))


@pytest.mark.parametrize(
    ("count", "layers"),
    [(32, (2, 8, 18)), (80, (5, 20, 45)), (36, (2, 9, 20)), (12, (0, 3, 6)), (4, (0, 1, 2)), (2, (0, 1)), (1, (0,))],
)
def test_filters_of_other_depths(count: int, layers: tuple[int, ...]) -> None:
    assert OmniKV().choosing_layers(ModelShape(count, 4, 2, 16)) == layers


def test_what_it_reads() -> None:
    """A filter reads every key and value once, as dense attention does; the others their list."""
    layers = Layers(OmniKV(k=5, layers=(1,)), layers=3)
    layers.read([0], [40])
    first, choosing, after = layers.decode([0])
    for call, _ in (first, choosing):
        (keys,), (values,) = call.meter.keys, call.meter.values
        assert keys is values and metadata_of(call) == ([0], 0)
        assert keys.keys_read(call.rows, call.kv).tolist() == [[41, 41]]
    (lists,) = after[0].meter.keys
    assert after[0].meter.values == (lists,) and lists.keys_read(after[0].rows, after[0].kv).tolist() == [[5, 5]]
    assert isinstance(lists, Lists) and lists.index.shape[1] == 1
    assert [o.dense_reason for _, o in (first, choosing, after)] == [
        "no layer before it has chosen", "chooses for the layers after it", None
    ]  # fmt: skip


def test_after_eviction_it_is_refused() -> None:
    """In the layer itself, whether it chooses or not; layers that keep everything go on."""
    method = OmniKV(k=5, layers=(0,))
    layers = Layers(method, layers=2)
    layers.read([0, 1], [20, 9])
    layers.decode([0, 1])
    layers.keep(1, 0, 7)
    with pytest.raises(Unsupported, match=r"omnikv: after eviction .* or do not evict"):
        layers.decode([0])
    layers.keep(0, 0, 7)
    with pytest.raises(Unsupported, match="omnikv: after eviction"):
        layers.decode([0])
    layers.cache.reset([0, 1])
    layers.read([0], [20])
    check(method, layers.decode([0]), (0,))


def test_the_model_must_be_told() -> None:
    layers = Layers(OmniKV(layers=(0,)))
    layers.read([0], [20])
    ((call, _),) = layers.decode([0])
    with pytest.raises(InvalidInput, match=r"LayerCall\.model is required: the layers that choose for omnikv depend"):
        OmniKV().run(replace(call, model=None), None)


def test_layers_must_be_the_models() -> None:
    with pytest.raises(InvalidInput, match=r"layers: .* has 2 \(0 to 1\), got layer 2"):
        OmniKV(layers=(0, 2)).check(ModelShape(2, 4, 2, 16))
