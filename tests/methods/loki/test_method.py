"""Keys by their scores in a few directions, beside loops in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.loki import Loki
from longreach.methods.loki.method import Coordinates
from longreach.methods.loki.plan import LokiPlan
from longreach.ops import HeadShard, Rows
from longreach.plans import Plan, PlannedModel
from longreach.testing.inputs import random_kv
from longreach.testing.tolerance import assert_close
from tests.methods.metered import metadata_of
from tests.methods.one_layer import CACHES, Layers, chosen_by, exact, highest, keys_of
from tests.methods.planned import MADE

every_cache = pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)


def random_plan(folder: Path, layers: int = 1, heads: int = 2, group: int = 2, dim: int = 16) -> tuple[str, Tensor]:
    """A plan file of random directions, and they: [L, G, D, D]."""
    basis = torch.linalg.qr(torch.randn(layers, heads, dim, dim))[0]
    arrays = LokiPlan(basis, torch.arange(dim, 0, -1.0).expand(layers, heads, -1)).arrays()
    model = PlannedModel("random", "that of the tests", layers, heads * group, heads, dim)
    Plan("loki", model, {}, MADE, arrays).save(folder / "plan.json")
    return str(folder / "plan.json"), arrays["basis"].float()


def wanted(method: Loki, basis: Tensor, call: LayerCall, row: int, head: int) -> list[int]:
    """The newest key, and those with the largest sums of probabilities by scores in the first directions."""
    keys, group = keys_of(call, row)[:, head], call.rows.q.shape[1] // call.kv.heads
    context, dim = keys.shape
    rank = method.rank if isinstance(method.rank, int) else round(method.rank * dim)
    first = basis[head, :, :rank].double()
    total = torch.zeros(context, dtype=torch.float64)
    for h in range(head * group, (head + 1) * group):
        x = (keys @ first) @ (call.rows.q[row, h].double() @ first) * call.scale
        x = x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)
        sink = [] if call.sink_logit is None else [call.sink_logit[h].double()[None]]
        total += torch.cat([x, *sink]).softmax(0)[:context]
    k = min(method.k, context) if isinstance(method.k, int) else max(1, math.ceil(method.k * context - 1e-9))
    return [*highest(total[:-1], k - 1), context - 1]


def check(method: Loki, basis: Tensor, call: LayerCall, outcome: Outcome) -> None:
    for row in range(call.rows.pos.shape[0]):
        for head in range(call.kv.heads):
            assert chosen_by(call, row, head) == wanted(method, basis[call.layer], call, row, head)
    assert_close(outcome.partial, exact(call))


@pytest.mark.covering("group", "k", "config")
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("k", "rank"), [(1, 1), (6, 4), (0.3, 0.25), (1.0, 0.5), (5, 1.0)])
@every_cache
def test_the_keys_with_the_highest_scores_are_chosen(
    group: int, k: Any, rank: Any, config: CacheConfig, tmp_path: Path
) -> None:
    """Ragged, in any order of slots."""
    plan, basis = random_plan(tmp_path, group=group)
    method = Loki(k, rank, plan)
    layers = Layers(method, group=group, config=config)
    layers.read([2, 0], [37, 6])
    layers.read([1, 2], [12, 9])
    for slots in ([0, 1, 2], [2, 1], [1, 0], [2, 0, 1]):
        ((call, outcome),) = layers.decode(slots)
        check(method, basis, call, outcome)


@pytest.mark.parametrize(
    "terms", [{"softcap": 0.5}, {"sink_logit": torch.tensor([3.0, -9.0, 0.0, 6.0])}], ids=["softcap", "sink"]
)
def test_other_logits(terms: dict[str, Any], tmp_path: Path) -> None:
    plan, basis = random_plan(tmp_path)
    method = Loki(6, 4, plan)
    layers = Layers(method, **terms)
    layers.read([0], [40])
    ((call, outcome),) = layers.decode([0])
    check(method, basis, call, outcome)
    plain = replace(call.observer(), softcap=None, sink_logit=None)
    method.run(plain, layers.state())
    assert chosen_by(plain, 0, 0) != chosen_by(call, 0, 0)


def test_with_all_directions_the_choice_is_that_of_exact_scores(tmp_path: Path) -> None:
    plan, _ = random_plan(tmp_path)
    layers = Layers(Loki(9, 1.0, plan))
    layers.read([0], [60])
    ((call, _),) = layers.decode([0])
    p = call.observer().op("pooled_scores")[0]
    assert [chosen_by(call, 0, g) for g in (0, 1)] == [[*highest(p[g, :60], 8), 60] for g in (0, 1)]


def test_every_layer_has_its_own_directions(tmp_path: Path) -> None:
    plan, basis = random_plan(tmp_path, layers=3)
    method = Loki(5, 3, plan, dense_layers=(1,))
    layers = Layers(method, layers=3)
    layers.read([0], [40])
    for call, outcome in layers.decode([0]):
        if call.layer == 1:
            assert outcome.dense_reason == "in dense_layers" and not layers.states.states(layer=1)
        else:
            check(method, basis, call, outcome)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_coordinates_are_kept_in_the_caches_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    plan, _ = random_plan(tmp_path)
    layers = Layers(Loki(9, 4, plan), dtype=dtype)
    layers.read([0], [60])
    ((call, outcome),) = layers.decode([0])
    assert_close(outcome.partial, exact(call))
    state = layers.state()
    assert isinstance(state, Coordinates) and state["keys"].dtype == state.basis.dtype == dtype
    assert state["keys"].shape[3] == 8 and not state.basis[..., 4:].any(), "4 of them, and zeros up to 8"


@every_cache
def test_cut_and_grown_again(config: CacheConfig, tmp_path: Path) -> None:
    plan, basis = random_plan(tmp_path)
    method = Loki(7, 4, plan)
    layers = Layers(method, config=config)
    layers.read([0, 1], [41, 30])
    for length in (40, 17, 1):
        layers.decode([1, 0])
        layers.cache.truncate([0], [length])
        layers.read([0], [6])
        for _ in range(3):
            ((call, outcome),) = layers.decode([0, 1])
            check(method, basis, call, outcome)


def test_what_it_reads(tmp_path: Path) -> None:
    """Coordinates of the whole context, the directions once, the newest key, and the keys and values chosen.

    Four coordinates are read as eight, of which four are zeros.
    """
    plan, _ = random_plan(tmp_path)
    layers = Layers(Loki(5, 4, plan))
    layers.read([0, 1], [40, 6])
    ((call, _),) = layers.decode([1, 0])
    directions = 2 * 16 * 8 * 4
    assert metadata_of(call) == ([7 * 2 * 8 * 4, 41 * 2 * 8 * 4], directions)
    newest, chosen = call.meter.keys
    assert newest.keys_read(call.rows, call.kv).tolist() == [[1, 1], [1, 1]]
    assert chosen.keys_read(call.rows, call.kv).tolist() == [[5, 5], [5, 5]] and call.meter.values == (chosen,)


def test_a_rank_takes_the_directions_of_its_heads(tmp_path: Path) -> None:
    plan, basis = random_plan(tmp_path, heads=4)
    model = ModelShape(1, 8, 4, 16, "that of the tests")
    call = LayerCall(
        0, Rows(torch.randn(1, 4, 16), torch.tensor([0]), torch.tensor([8])), random_kv([9], heads=2, dim=16),
        torch.tensor([0]), 0.25, shard=HeadShard(2, 2, 4), model=model,
    )  # fmt: skip
    state = Loki(3, 5, plan).new_state(call, 1)
    assert state is not None and torch.equal(state.basis[..., :5], basis[0, 2:, :, :5])
    assert state.basis.shape[2] == 8 and not state.basis[..., 5:].any()


def test_without_a_model_no_plan_is_found(tmp_path: Path) -> None:
    plan, _ = random_plan(tmp_path)
    layers = Layers(Loki(3, 4, plan))
    (call,) = layers.read([0], [20])
    with pytest.raises(InvalidInput, match=r"LayerCall\.model is required: Loki looks up its plan by model"):
        layers.method.new_state(replace(call, model=None), 1)


@every_cache
def test_after_eviction_coordinates_are_of_the_kept_keys(config: CacheConfig, tmp_path: Path) -> None:
    """Other keys in each head, of two layers one; sequences go on, are cut to what came after, and begin anew."""
    plan, basis = random_plan(tmp_path, layers=2)
    method = Loki(0.4, 5, plan)
    layers = Layers(method, layers=2, config=config)
    layers.read([0, 2, 1], [41, 30, 19])
    layers.decode([0, 1, 2])
    for slot, count in ((0, 18), (2, 7)):
        layers.keep(0, slot, count)
    for _ in range(6):
        found = layers.decode([1, 2, 0])
        for call, outcome in found:
            check(method, basis, call, outcome)
        assert found[0][0].evicted and not found[1][0].evicted
    assert [call.rows.pos.tolist() for call, _ in found] == [[25, 12, 23], [25, 36, 47]]
    layers.keep(0, 0, 9)
    layers.cache.truncate([2], [33])
    layers.cache.reset([1])
    layers.read([1, 2], [10, 5])
    for _ in range(3):
        for call, outcome in layers.decode([0, 1, 2]):
            check(method, basis, call, outcome)
