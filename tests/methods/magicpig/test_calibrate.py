"""Expected errors and reads against draws, and the choice against all choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.magicpig import PRESETS, MagicPIG
from longreach.methods.magicpig import plan as plan_module
from longreach.methods.magicpig import state as state_module
from longreach.methods.magicpig.allocate import cheapest
from longreach.methods.magicpig.calibrate import PAIRS, centre_of, counted, expected_error
from longreach.methods.magicpig.notes import _bytes as bytes_of_rows
from longreach.methods.magicpig.plan import DENSE, MagicPIGPlan, Options
from longreach.methods.magicpig.state import LayerTables
from longreach.ops import Lists
from tests.methods.drive import MODEL
from tests.methods.magicpig.plain import attended, sealed
from tests.methods.one_layer import Layers, keys_of
from tests.methods.planned import magicpig_plan

KEYS, DIM, HEADS, GROUP, DRAWS = 300, 16, 2, 3, 200
METHOD = MagicPIG(bits=6, tables=20, local=8, seal=8, centre=64, capacity=1.0, dense_layers=())


def options(method: MagicPIG) -> Options:
    names = ("seed", "least", "share", "sinks", "local", "seal", "centre")
    return Options(**{name: getattr(method, name) for name in names})


def row() -> LayerCall:
    """A row of attention that is neither flat nor on few keys."""
    layers = Layers(Dense(), heads=HEADS, group=GROUP, dim=DIM, slots=1, seed=5)
    layers.read([0], [KEYS])
    return layers.decode([0])[0][0]


def parts(call: LayerCall, method: MagicPIG) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [n, G, D], the centre, and the keys that are always read, bool [1, n]."""
    k = keys_of(call, 0).float()
    page, offset = call.kv.locate(torch.zeros(len(k), dtype=torch.long), torch.arange(len(k)))
    at = torch.arange(len(k))
    certain = (at < method.sinks) | (at >= sealed(method, KEYS))
    return k, call.kv.v[page, :, offset].float(), centre_of(k, method.schedule), certain[None]


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("pair", [(4, 9), (5, 30), (6, 60)])
def test_the_error_is_that_of_draws(share: Literal["own", "group"], pair: tuple[int, int]) -> None:
    """The root of the mean squared error over seeds, to first order: within 0.7 and 1.4 of the expected error."""
    call = row()
    method = replace(METHOD, bits=pair[0], tables=pair[1], share=share)
    k, v, centre, certain = parts(call, method)
    exact, _ = attended(call, 0, torch.zeros(HEADS * GROUP, len(k), dtype=torch.float64))
    squares = torch.zeros(HEADS * GROUP, dtype=torch.float64)
    for seed in range(DRAWS):
        mine, fresh = replace(method, seed=seed), call.observer()
        out = mine.run(fresh, mine.new_state(fresh, 1)).partial.out[0].double()
        squares += (out - exact).square().sum(-1)
    measured = (squares / DRAWS).sqrt() / exact.norm(dim=-1)
    for head in range(HEADS * GROUP):
        g = head // GROUP
        group = slice(g * GROUP, (g + 1) * GROUP)
        q = call.rows.q[:, group]
        weights = torch.softmax((q @ k[:, g].T) * call.scale, -1)
        only = weights.clone()  # an error of one head: the others weigh nothing and have an error of 0
        only[:, [h for h in range(GROUP) if h != head - g * GROUP]] = 0
        found = expected_error(q, k[:, g] - centre[g], v[:, g], only, certain, [pair], options(method))
        assert 0.7 < measured[head] / (GROUP * found[0]) < 1.4


def test_what_is_counted_is_what_the_method_samples() -> None:
    """By the same seed: the keys of the lists, of query heads and of groups, and the ids that were looked up."""
    call = row()
    k, _, centre, _ = parts(call, METHOD)
    inside = k[METHOD.sinks : sealed(METHOD, KEYS)]
    pairs = [(4, 9), (6, 20), (6, 5), (5, 12)]
    union, each, looked_up = counted(call.rows.q, inside, centre, pairs, options(replace(METHOD, seed=7)))
    for n, (bits, tables) in enumerate(pairs):
        for share, found in (("group", union), ("own", each)):
            method = replace(METHOD, bits=bits, tables=tables, share=share, seed=7)
            fresh = call.observer()
            state = method.new_state(fresh, 1)
            assert isinstance(state, LayerTables)
            method.run(fresh, state)
            lists = fresh.meter.values[-1]
            assert isinstance(lists, Lists)
            count = lists.count[0].unflatten(0, (HEADS, -1)).sum(1)
            assert found[:, n].tolist() == pytest.approx((count / len(inside)).tolist())
            torch.testing.assert_close(state.centre[0], centre)
        assert bool((each[:, n] >= union[:, n]).all() and (looked_up[:, n] >= 2 * each[:, n]).all())


def test_pairs() -> None:
    assert set(PRESETS) <= set(PAIRS) and len(set(PAIRS)) == len(PAIRS)


@pytest.mark.parametrize("limit", [None, 1.4])
def test_the_choice_is_the_best_of_all(limit: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    for total in (0.6, 1.0, 1.7, 3.0):
        costs, errors, room = torch.rand(3, 4, 5, generator=draw, dtype=torch.float64)
        errors[:, -1], costs[:, -1], room[:, -1] = 0, 1, 0
        sums = [
            tuple(float(sum(x[n, c] for n, c in enumerate(choice))) for x in (costs, errors, room))
            for choice in product(range(5), repeat=4)
        ]
        fit = [error for cost, error, memory in sums if cost <= total and memory <= (limit or 9)]
        found = cheapest(costs, errors, room, total, limit)
        if not fit:
            assert found is None
            continue
        assert found is not None
        cost, error, memory = (float(sum(x[n, c] for n, c in enumerate(found))) for x in (costs, errors, room))
        assert cost <= total * 1.000001 and memory <= (limit or 9) * 1.000001
        # sums within a step of each other count as equal
        assert error <= min(fit) + (0.0 if limit is None else 0.1)


@pytest.mark.parametrize(
    ("costs", "room"),
    [
        ((0.50002, 0.50001), (0.1, 0.1)),  # in the same step of costs
        ((0.6, 0.5), (0.1, 0.1)),  # in different ones
        ((0.50002, 0.50001), (0.1, 0.9)),  # in the same step of costs, and in different ones of room
        ((0.5, 0.5), (0.002, 0.001)),
    ],
)
def test_of_equal_errors_the_least_cost_then_the_least_room(
    costs: tuple[float, float], room: tuple[float, float]
) -> None:
    for order in (1, -1):
        one, other, error = (torch.tensor([x[::order]], dtype=torch.float64) for x in (costs, room, (0.2, 0.2)))
        for limit in (None, 1.0):
            assert cheapest(one, error, other, 1.0, limit) == [1 if order == 1 else 0]


def test_choices_meet_budget_and_memory() -> None:
    plan = MagicPIGPlan.of(magicpig_plan(MODEL))
    reads = []
    for budget in (0.42, 0.6, 0.8, 1.0):
        chosen = plan.choose(budget)
        found = plan.expected(chosen)
        reads.append(sum(found["search"]) + sum(found["attention"]))
        assert reads[-1] <= 3 * budget * 1.000001
    assert reads == sorted(reads) and chosen == (DENSE,) * 3
    memory = plan.table_memory()
    assert max(memory) > 0.2 > 0.15 > min(memory)
    chosen = plan.choose(0.8, 0.15)
    assert sum(plan.expected(chosen)["memory"]) <= 3 * 0.15
    with pytest.raises(Exception, match=r"budget: no choice .* at most 0\.05 .* after 200 tokens; the fewest"):
        plan.choose(0.05)
    with pytest.raises(Exception, match=r"with tables of at most 1e-05 of the memory of keys and values"):
        plan.choose(0.5, 1e-5)


@pytest.mark.parametrize("segment", [1 << 14, 16])
@pytest.mark.parametrize("share", ["own", "group"])
def test_reads_are_those_of_steps(
    share: Literal["own", "group"], segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over the steps between two blocks that enter the tables, those of sealing included. With small segments
    a tenth of the bytes are offsets of buckets.
    """
    for module in (plan_module, state_module):
        monkeypatch.setattr(module, "SEGMENT", segment)
    method = replace(METHOD, share=share, seal=16)
    layers = Layers(method, heads=HEADS, group=GROUP, dim=DIM, slots=1, seed=3)
    start = KEYS - method.seal // 2
    layers.read([0], [start])
    columns = torch.zeros(3, HEADS, 1, dtype=torch.float64)
    read = 0.0
    for n in range(method.seal):
        ((call, _),) = layers.decode([0])
        k = keys_of(call, 0).float()
        centre = centre_of(k, method.schedule)
        found = counted(call.rows.q, k[method.sinks : sealed(method, start + n)], centre, [(6, 20)], options(method))
        columns += torch.stack(list(found))
        read += bytes_of(call) / (2 * (start + n + 1) * HEADS * DIM * 4)
    names = ("sampled", "sampled_heads", "looked_up")
    arrays = {name: (x / method.seal)[None] for name, x in zip(names, columns, strict=True)}
    plan = MagicPIGPlan(
        ((6, 20),), ((6, 20),), (0,), options(method), 0.5, None, KEYS, 4, (HEADS * GROUP, HEADS, DIM),
        error=torch.zeros(1, HEADS, 1), **arrays,
    )  # fmt: skip
    search, attention = plan.reads()
    assert float(search + attention) == pytest.approx(read / method.seal, rel=0.02)


def bytes_of(call: LayerCall) -> float:
    """Bytes of keys, values and metadata that a call of one row read, lists' entries included."""
    return float(bytes_of_rows(call, call.meter.noted).sum())
