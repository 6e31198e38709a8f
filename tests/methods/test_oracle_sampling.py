"""Keys drawn by their exact probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from longreach.methods.dense import Dense
from longreach.methods.oracle_sampling import OracleSampling
from longreach.ops import Lists
from longreach.runtime import Segment
from tests.methods.one_layer import Layers, exact, probabilities_of


def test_the_mean_of_drawn_values() -> None:
    """Definition 3.1, where each query head has its own KV head: out is the mean of the drawn values, lse is exact."""
    layers = Layers(OracleSampling(k=0.3), group=1, slots=2)
    layers.read([0, 1], [50, 9])
    ((call, outcome),) = layers.decode([1, 0])
    found = call.meter.values[-1]
    assert isinstance(found, Lists) and found.log_weight is not None
    for row, draws in ((0, 3), (1, 16)):
        p = probabilities_of(call, row)
        for head in range(2):
            index = found.index[row, head, : int(found.count[row, head])].long()
            times = (found.log_weight[row, head, : len(index)].double().exp() * p[head, index] * draws).round()
            assert int(times.sum()) == draws and int(times.min()) >= 1
            page, offset = call.kv.locate(call.rows.seq[row], index)
            mean = (times[:, None] * call.kv.v[page, head, offset].double()).sum(0) / draws
            torch.testing.assert_close(outcome.partial.out[row, head].double(), mean, rtol=0, atol=1e-5)
    dense = Dense().run(call.observer(), None).partial
    torch.testing.assert_close(outcome.partial.lse, dense.lse)
    torch.testing.assert_close(outcome.partial.out.double(), exact(call).out, rtol=0, atol=1e-5)


@pytest.mark.parametrize("draw", ["iid", "systematic"])
def test_sums_are_unbiased_for_groups(draw: str) -> None:
    layers = Layers(Dense(), group=4, slots=1, seed=2)
    layers.read([0], [80])
    q = 2 * layers.random(1, 8, 16)
    ((call, dense),) = layers._pass(Segment("decode", Dense()), [0], [1], {"q": q})
    parts = [OracleSampling(k=0.2, draw=draw, seed=n).run(call.observer(), None).partial for n in range(400)]  # type: ignore[arg-type]
    shares = torch.stack([(p.lse - dense.partial.lse).double().exp()[0] for p in parts])
    numerators = shares[..., None] * torch.stack([p.out.double()[0] for p in parts])
    for found, want in ((shares, torch.ones(8)), (numerators, dense.partial.out[0])):
        off = (found.mean(0) - want.double()) / (found.std(0) / math.sqrt(len(found)))
        assert float(off.abs().max()) < 4.5 and float(off.square().mean().sqrt()) < 1.5


def test_the_same_draws_in_any_batch_and_on_any_rank() -> None:
    """By layer, position and KV head of the whole model."""
    method, drawn = OracleSampling(k=6), Counter[int]()
    layers = Layers(method, heads=2, slots=3, layers=2)
    layers.read([0, 1, 2], [30, 30, 12])
    calls = [call for call, _ in layers.decode([2, 0, 1])]
    for call in calls:
        found = call.meter.values[-1]
        assert isinstance(found, Lists)
        alone = call.observer().take(torch.tensor([1]))
        method.run(alone, None)
        lists = alone.meter.values[-1]
        assert isinstance(lists, Lists)
        for head in range(2):
            n = int(found.count[1, head])
            assert lists.index[0, head, : int(lists.count[0, head])].tolist() == found.index[1, head, :n].tolist()
            drawn.update(found.index[1, head, :n].tolist())
    assert len(drawn) > 6, "layers and heads draw by numbers of their own"
