"""Blocks by an upper bound of their scores, beside loops in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.quest import BlockBounds, Quest, touched
from longreach.ops import Rows, Spans
from longreach.ops.block_bounds import score_blocks
from longreach.ops.types import RowRange
from longreach.testing.inputs import random_kv
from longreach.testing.oracle import exact_attend
from longreach.testing.tolerance import assert_close
from tests.methods.metered import metadata_of
from tests.methods.one_layer import CACHES, Layers, chosen_by, exact, highest, keys_of

FEW = Quest(k=9, page=4, dense_layers=())
every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)


def wanted(method: Quest, call: LayerCall, row: int, head: int) -> list[int]:
    """The paper's choice, in loops: the newest block, and of the others those with the highest bounds."""
    keys, group = keys_of(call, row)[:, head], call.rows.q.shape[1] // call.kv.heads
    queries = call.rows.q[row, head * group : (head + 1) * group].double()
    context = keys.shape[0]
    newest = (context - 1) // method.page
    bound = torch.zeros(newest, dtype=torch.float64)
    for block in range(newest):
        part = keys[block * method.page : (block + 1) * method.page]
        low, high = part.amin(0), part.amax(0)
        for q in queries:
            bound[block] += torch.maximum(q * low, q * high).sum()
    k = min(method.k, context) if isinstance(method.k, int) else max(1, math.ceil(method.k * context - 1e-9))
    return [*highest(bound, math.ceil(k / method.page) - 1), newest]


def upper_bounds(call: LayerCall, state: BlockBounds) -> Tensor:
    """fp32 [R, G, blocks], by what the state holds; from the newest block on anything."""
    return score_blocks(call.rows, call.kv, state["low"], state["high"], state.per)


def check(method: Quest, call: LayerCall, outcome: Outcome) -> None:
    for row in range(call.rows.pos.shape[0]):
        for head in range(call.kv.heads):
            assert chosen_by(call, row, head) == wanted(method, call, row, head)
    assert_close(outcome.partial, exact(call))


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("k", [1, 9, 0.1, 0.5, 1.0])
@every_cache
def test_the_blocks_with_the_highest_bounds_are_chosen(group: int, k: Any, config: CacheConfig) -> None:
    """Ragged, in any order of slots, as sequences grow past the ends of blocks."""
    method = Quest(k=k, page=4, dense_layers=())
    layers = Layers(method, group=group, config=config)
    layers.read([2, 0], [37, 6])
    layers.read([1, 2], [12, 9])
    for slots in ([0, 1, 2], [2, 1], [1, 0], [2, 0, 1], [0], [0], [0]):
        ((call, outcome),) = layers.decode(slots)
        check(method, call, outcome)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layers = Layers(FEW, dtype=dtype)
    layers.read([0], [50])
    ((call, outcome),) = layers.decode([0])
    check(FEW, call, outcome)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_the_bound_is_one(seed: int, scale: float) -> None:
    """No key of a block scores higher with a query than the block's bound, nor do its groups' sums."""
    draw = torch.Generator().manual_seed(seed)
    layers = Layers(FEW, group=3, seed=seed)
    layers.read([0, 1], [43, 30])
    ((call, _),) = layers.decode([0, 1])
    q = torch.randn(call.rows.q.shape, generator=draw) * scale
    call = LayerCall(0, Rows(q, call.rows.seq, call.rows.pos), call.kv, call.slots, call.scale)
    state = layers.state()
    assert isinstance(state, BlockBounds)
    found = upper_bounds(call, state)
    tight = 0
    for row in range(2):
        keys = keys_of(call, row)
        sums = torch.einsum("ngd,gd->ng", keys, q[row].double().unflatten(0, (2, 3)).sum(1))
        for block in range((keys.shape[0] - 1) // 4):
            highest_sum = sums[4 * block : 4 * block + 4].amax(0)
            assert bool((found[row, :, block] >= highest_sum - 1e-4 * scale).all())
            tight += int((found[row, :, block] < 3 * highest_sum.abs()).sum())
    assert tight, "a bound that is far above everything bounds nothing"


def test_blocks_whose_keys_are_all_the_same_are_bounded_exactly() -> None:
    layers = Layers(FEW, group=3)
    k = layers.random(10, 2, 16)
    layers.read([0], [40], k=k.repeat_interleave(4, 0))
    ((call, _),) = layers.decode([0])
    state = layers.state()
    assert isinstance(state, BlockBounds)
    sums = torch.einsum("ngd,gd->gn", k, call.rows.q[0].unflatten(0, (2, 3)).sum(1))
    torch.testing.assert_close(upper_bounds(call, state)[0, :, :10], sums)


def test_every_query_head_of_a_group_has_its_say() -> None:
    """One query head looks for slot 2, the other for slot 21; a choice by either alone would miss one of them."""
    keys, q = torch.zeros(40, 1, 8), torch.zeros(1, 2, 8)
    q[0, 0, 0], q[0, 1, 1] = 5.0, -5.0
    keys[2, 0, 0], keys[21, 0, 1] = 3.0, -3.0
    layers = Layers(Quest(k=12, page=4, dense_layers=()), heads=1, dim=8)
    layers.read([0], [40], k=keys)
    ((call, _),) = layers.decode([0], q=q, k=torch.zeros(1, 1, 8))
    assert chosen_by(call, 0, 0) == [0, 5, 10]


@every_cache
def test_cut_and_grown_again(config: CacheConfig) -> None:
    """Cuts in the middle of blocks, at their ends and across several; what follows is other text."""
    layers = Layers(FEW, config=config)
    layers.read([0, 1], [41, 30])
    for length in (40, 38, 33, 32, 17, 1):
        layers.decode([1, 0])
        layers.cache.truncate([0], [length])
        layers.read([0], [6])
        for _ in range(5):
            ((call, outcome),) = layers.decode([0, 1])
            check(FEW, call, outcome)


def test_bounds_read_no_slot_that_is_not_filled() -> None:
    kv = random_kv([10, 3], heads=2, dim=8)
    kv.k[0, :, 10:], kv.k[1, :, 3:] = torch.nan, torch.nan
    state = BlockBounds(kv, 4)
    state.note(kv, torch.tensor([0, 0, 1]), torch.tensor([1, 8, 2]))
    for seq, block, slots in ((0, 0, slice(0, 4)), (0, 2, slice(8, 10)), (1, 0, slice(0, 3))):
        assert torch.equal(state["low"][seq, :, block], kv.k[seq, :, slots].amin(1))
        assert torch.equal(state["high"][seq, :, block], kv.k[seq, :, slots].amax(1))
    assert state["low"][0, :, 1].isnan().all() and state["low"][1, :, 1].isnan().all(), "others stay as they were"


def test_blocks_that_rows_touch() -> None:
    pos = torch.cat([torch.arange(3, 14), torch.arange(2)])
    seq = torch.tensor([1] * 11 + [0] * 2)
    runs = (RowRange(11, 1, 3), RowRange(0, 2, 9), RowRange(2, 0, 0))
    rows = Rows(torch.randn(13, 2, 8), seq, pos, runs)
    assert [x.tolist() for x in touched(rows, 4)] == [[1, 1, 1, 1, 0], [0, 4, 8, 12, 0]]
    unknown = Rows(rows.q, seq, pos, (RowRange(11, 1), RowRange(2, 0)))
    for told in (unknown, Rows(rows.q, seq, pos)):
        assert [x.tolist() for x in touched(told, 4)] == [seq.tolist(), pos.tolist()]


@pytest.mark.parametrize("counts", [[1] * 30, [7, 16, 7], [29, 1]])
def test_bounds_are_the_same_however_the_prompt_is_read(counts: list[int]) -> None:
    k, states = torch.randn(30, 2, 16), []
    for chunks in ([30], counts):
        layers, parts = Layers(FEW), k.split(chunks)
        for chunk, part in zip(chunks, parts, strict=True):
            layers.read([1], [chunk], k=part)
        states.append(layers.state())
    for name in ("low", "high"):
        assert torch.equal(states[0][name][1, :, :8], states[1][name][1, :, :8])  # type: ignore[index]


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return made


@every_cache
def test_a_block_longer_than_the_cache_is_all_of_it(config: CacheConfig) -> None:
    """However long, as the cache grows: one block, whose gathered slots are the cache's and not the block's."""
    method = Quest(k=1, page=10**9, dense_layers=())
    layers = Layers(method, config=config)
    with Largest() as largest:
        layers.read([0, 1], [37, 6])
        layers.read([1], [150])
        found = [call_and_outcome for _ in range(3) for call_and_outcome in layers.decode([1, 0])]
    for call, outcome in found:
        check(method, call, outcome)
        assert chosen_by(call, 0, 0) == [0]
        assert_close(outcome.partial, exact_attend(call.rows, call.kv, Spans.dense(), scale=call.scale))
    memory = layers.cache.nbytes // 4
    assert 0 < largest.numbers <= 4 * memory and memory < 100_000


def test_what_it_reads() -> None:
    """Bounds of every block but the newest, the newest's keys to bound it, the blocks chosen and their list."""
    layers = Layers(FEW, heads=2, dim=16)
    layers.read([0, 1], [40, 6])
    ((call, _),) = layers.decode([0, 1])
    assert metadata_of(call) == ([10 * 2 * 2 * 16 * 4, 1 * 2 * 2 * 16 * 4], 0)
    bounded, chosen = call.meter.keys
    assert bounded.keys_read(call.rows, call.kv).tolist() == [[1, 1], [3, 3]]
    assert chosen.keys_read(call.rows, call.kv).tolist() == [[9, 9], [7, 7]], (
        "three blocks; there are two of the short one"
    )
    assert call.meter.values == (chosen,)


def test_dense_layers_keep_nothing() -> None:
    layers = Layers(Quest(dense_layers=(0, 2)), layers=4)
    layers.read([0], [70])
    outcomes = [outcome for _, outcome in layers.decode([0])]
    assert [o.dense_reason for o in outcomes] == ["in dense_layers", None, "in dense_layers", None]
    assert [len(layers.states.states(layer=n)) for n in range(4)] == [0, 1, 0, 1]


@every_cache
def test_after_eviction_blocks_are_of_the_kept_keys(config: CacheConfig) -> None:
    """Other keys in each head, of two layers one; sequences go on, are cut to what came after, and begin anew."""
    layers = Layers(FEW, layers=2, config=config)
    layers.read([0, 2, 1], [41, 30, 19])
    layers.decode([0, 1, 2])
    for slot, count in ((0, 18), (2, 7)):
        layers.keep(0, slot, count)
    for _ in range(6):
        found = layers.decode([1, 2, 0])
        for call, outcome in found:
            check(FEW, call, outcome)
        assert found[0][0].evicted and not found[1][0].evicted
    assert [call.rows.pos.tolist() for call, _ in found] == [[25, 12, 23], [25, 36, 47]]
    layers.keep(0, 0, 9)
    layers.cache.truncate([2], [33])
    layers.cache.reset([1])
    layers.read([1, 2], [10, 5])
    for _ in range(3):
        for call, outcome in layers.decode([0, 1, 2]):
            check(FEW, call, outcome)


def test_dense_layers_must_be_the_models() -> None:
    with pytest.raises(InvalidInput, match=r"dense_layers: .* has 2 \(0 to 1\), got layer 2"):
        Quest(dense_layers=(0, 2)).check(ModelShape(2, 4, 2, 16))
