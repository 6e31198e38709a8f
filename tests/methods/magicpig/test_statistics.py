"""Over random projections: keys are sampled as often as said, and softmax's two sums are unbiased."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.magicpig import MagicPIG
from longreach.ops import Lists, Partial
from longreach.runtime import Segment
from tests.methods.magicpig.plain import inclusion
from tests.methods.one_layer import Layers, keys_of

KEYS, DIM, HEADS, GROUP = 300, 16, 2, 3
METHOD = MagicPIG(bits=6, tables=20, sinks=4, local=8, seal=8, centre=200, capacity=1.0, dense_layers=())


class Draw(NamedTuple):
    """One row by one seed: its lists, and attention over the sample."""

    lists: Lists
    partial: Partial


def layer() -> LayerCall:
    """A row whose keys lie at all angles to its queries, and of which some are heavy."""
    layers = Layers(Dense(), heads=HEADS, group=GROUP, dim=DIM, slots=1, seed=5)
    q, k = layers.random(1, HEADS * GROUP, DIM), layers.random(KEYS, HEADS, DIM)
    q = q.unflatten(1, (HEADS, GROUP)) + 1.5 * q.unflatten(1, (HEADS, GROUP))[:, :, :1]  # heads of a group are alike
    k = k + torch.linspace(-1, 2, KEYS)[:, None, None] * torch.nn.functional.normalize(q[:, :, 0], dim=-1) * 3 + 0.5
    layers.read([0], [KEYS], k=k)
    return layers._pass(Segment("decode", Dense()), [0], [1], {"q": q.flatten(1, 2)})[0][0]


def draws(call: LayerCall, method: MagicPIG, seeds: int) -> Iterator[Draw]:
    for seed in range(seeds):
        mine, fresh = replace(method, seed=seed), call.observer()
        outcome = mine.run(fresh, mine.new_state(fresh, 1))
        found = fresh.meter.values[-1]
        assert isinstance(found, Lists) and outcome.dense_reason is None
        yield Draw(found, outcome.partial)


def deviation(samples: Tensor, expected: Tensor) -> Tensor:
    """How many standard errors the mean of samples [n, ...] is away from what is expected."""
    error = samples.std(0) / math.sqrt(len(samples))
    return (samples.mean(0) - expected) / error.clamp(min=1e-300)


@pytest.mark.parametrize("seeds", [150, pytest.param(2000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("share", ["own", "group"])
def test_numerator_and_denominator_are_unbiased(share: str, seeds: int) -> None:
    """In units of exact attention's. Standard errors are those of the draws themselves."""
    call = layer()
    exact = Dense().run(call.observer(), None).partial
    parts = [draw.partial for draw in draws(call, replace(METHOD, share=share), seeds)]  # type: ignore[arg-type]
    denominators = torch.stack([(p.lse - exact.lse).double().exp()[0] for p in parts])
    numerators = denominators[..., None] * torch.stack([p.out.double()[0] for p in parts])
    assert float(denominators.std()) > 0.02, "what is always the same shows nothing"
    assert float(deviation(denominators, torch.ones(())).abs().max()) < 4
    off = deviation(numerators, exact.out[0].double())
    assert float(off.abs().max()) < 4.5 and 0.5 < float(off.square().mean().sqrt()) < 1.6
    biased = deviation(numerators, 0.9 * exact.out[0].double())
    assert seeds < 2000 or float(biased.square().mean().sqrt()) > 1.6


@pytest.mark.parametrize("seeds", [200, pytest.param(2000, marks=pytest.mark.sweep)])
def test_keys_are_sampled_as_often_as_said(seeds: int) -> None:
    """In every decade of u, with standard errors of the draws, as keys near each other collide together."""
    call, method = layer(), replace(METHOD, share="own", centre=0)
    keys, heads = keys_of(call, 0), HEADS * GROUP
    stop = int(method.schedule.stop(torch.tensor(KEYS)))
    q = call.rows.q[0].double()
    cosine = torch.stack(
        [torch.nn.functional.cosine_similarity(keys[4:stop, h // GROUP], q[h : h + 1], dim=-1) for h in range(heads)]
    )
    u = torch.tensor([[inclusion(method, c) for c in row] for row in cosine.tolist()])
    sampled = torch.zeros(seeds, *u.shape)
    for n, draw in enumerate(draws(call, method, seeds)):
        for head in range(heads):
            slots = draw.lists.index[0, head, : int(draw.lists.count[0, head])].long()
            sampled[n, head, slots - 4] = 1
            weight = draw.lists.log_weight
            assert weight is not None
            torch.testing.assert_close(weight[0, head, : len(slots)], -u[head, slots - 4].log(), rtol=0, atol=1e-4)
    for low in (1e-3, 1e-2, 1e-1):
        decade = (u >= low) & (u < 10 * low)
        assert int(decade.sum()) > 20
        found = sampled[:, decade].sum(1).double()
        assert abs(float(deviation(found, u[decade].sum().double()))) < 3
