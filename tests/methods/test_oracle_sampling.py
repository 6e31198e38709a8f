"""Keys drawn by their exact probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.oracle_sampling import OracleSampling
from longreach.ops import HeadShard, Lists, Rows
from longreach.runtime import Segment
from tests.methods.one_layer import Layers, exact, probabilities_of
from tests.methods.unbiased import check_many, farthest


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
    """The denominators of 8 query heads and their numerators along the exact output within 3 standard errors, and the
    128 channels of all numerators.
    """
    layers = Layers(Dense(), group=4, slots=1, seed=2)
    layers.read([0], [80])
    q = 2 * layers.random(1, 8, 16)
    ((call, dense),) = layers._pass(Segment("decode", Dense()), [0], [1], {"q": q})
    parts = [OracleSampling(k=0.2, draw=draw, seed=n).run(call.observer(), None).partial for n in range(2000)]  # type: ignore[arg-type]
    shares = torch.stack([(p.lse - dense.partial.lse).double().exp()[0] for p in parts])
    numerators = shares[..., None] * torch.stack([p.out.double()[0] for p in parts])
    out = dense.partial.out[0].double()
    along = (numerators * out).sum(-1) / out.square().sum(-1)
    assert farthest(shares, torch.ones(())) < 3 and farthest(along, torch.ones(())) < 3
    check_many(numerators, out, power=0.1)


def test_the_same_draws_in_any_batch() -> None:
    """By layer and position."""
    method, drawn = OracleSampling(k=6), Counter[int]()
    for call in calls_of(method):
        found = lists_of(call)
        alone = call.observer().take(torch.tensor([1]))
        method.run(alone, None)
        lists = lists_of(alone)
        for head in range(2):
            keys = drawn_keys(found, head)[1]
            assert drawn_keys(lists, head) == [keys]
            drawn.update(keys)
    assert len(drawn) > 6, "layers and heads draw by numbers of their own"


@pytest.mark.parametrize("draw", ["iid", "systematic"])
def test_the_same_draws_on_any_rank(draw: str) -> None:
    """Two ranks with one KV head each draw what one process with both draws, by the KV head of the whole model."""
    method = OracleSampling(k=6, draw=draw)  # type: ignore[arg-type]
    for call in calls_of(method):
        whole, group = lists_of(call), call.rows.q.shape[1] // 2
        for head in range(2):
            kv = replace(call.kv, k=call.kv.k[:, head : head + 1], v=call.kv.v[:, head : head + 1])
            rows = Rows(call.rows.q[:, group * head : group * (head + 1)], call.rows.seq, call.rows.pos)
            shard = HeadShard(head, 1, 2, lambda x: x)
            rank = replace(call.observer(), rows=rows, kv=kv, shard=shard, shared={})
            outcome = method.run(rank, None)
            mine = lists_of(rank)
            assert drawn_keys(mine, 0) == drawn_keys(whole, head)
            assert whole.log_weight is not None and mine.log_weight is not None
            n = int(whole.count[0, head])
            torch.testing.assert_close(mine.log_weight[0, 0, :n], whole.log_weight[0, head, :n])
            both = method.run(call.observer(), None).partial.out[:, group * head : group * (head + 1)]
            torch.testing.assert_close(outcome.partial.out, both)
            # a rank that took its head for the first one of the model would draw otherwise
            unaware = replace(rank.observer(), shard=None)
            method.run(unaware, None)
            assert (drawn_keys(lists_of(unaware), 0) == drawn_keys(whole, head)) == (head == 0)


def calls_of(method: OracleSampling) -> list[LayerCall]:
    """Decode calls of two layers over three sequences."""
    layers = Layers(method, heads=2, slots=3, layers=2)
    layers.read([0, 1, 2], [30, 30, 12])
    return [call for call, _ in layers.decode([2, 0, 1])]


def lists_of(call: LayerCall) -> Lists:
    found = call.meter.values[-1]
    assert isinstance(found, Lists)
    return found


def drawn_keys(lists: Lists, head: int) -> list[list[int]]:
    """Of each row."""
    rows = zip(lists.index[:, head].tolist(), lists.count[:, head].tolist(), strict=True)
    return [index[:count] for index, count in rows]
