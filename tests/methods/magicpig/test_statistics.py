"""Over random projections: keys are sampled as often as said, and softmax's two sums are unbiased."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.magicpig import MagicPIG
from longreach.ops import Lists, Partial
from longreach.runtime import Segment
from tests.methods.magicpig.plain import inclusion
from tests.methods.one_layer import Layers, keys_of
from tests.methods.unbiased import check_many, farthest

KEYS, DIM, HEADS, GROUP, SEEDS = 300, 16, 2, 3, 2000
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


@pytest.mark.parametrize("seeds", [150, pytest.param(SEEDS, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("share", ["own", "group"])
def test_numerator_and_denominator_are_unbiased(share: str, seeds: int) -> None:
    """In units of exact attention's, within 3 standard errors of the draws: for each of 6 query heads the denominator,
    and the numerator along the exact output. Then the 96 channels of all numerators.
    """
    call = layer()
    exact = Dense().run(call.observer(), None).partial
    parts = [draw.partial for draw in draws(call, replace(METHOD, share=share), seeds)]  # type: ignore[arg-type]
    denominators = torch.stack([(p.lse - exact.lse).double().exp()[0] for p in parts])
    numerators = denominators[..., None] * torch.stack([p.out.double()[0] for p in parts])
    assert float(denominators.std()) > 0.02, "what is always the same shows nothing"
    out = exact.out[0].double()
    along = (numerators * out).sum(-1) / out.square().sum(-1)
    assert denominators.shape == along.shape == (seeds, HEADS * GROUP)
    assert farthest(denominators, torch.ones(())) < 3 and farthest(along, torch.ones(())) < 3
    check_many(numerators, out, power=0.5 if seeds < SEEDS else 0.1)


@pytest.mark.parametrize("seeds", [200, pytest.param(SEEDS, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("share", ["own", "group"])
def test_keys_are_sampled_as_often_as_said(share: str, seeds: int) -> None:
    """In every decade of u, the query heads that sampled a key over the sum of their u are 1 within 3 standard errors.
    Those are of the draws, as keys near each other collide together.
    """
    call, method = layer(), replace(METHOD, share=share, centre=0)  # type: ignore[arg-type]
    keys, heads = keys_of(call, 0), HEADS * GROUP
    stop = int(method.schedule.stop(torch.tensor(KEYS), 0))
    q = call.rows.q[0].double()
    cosine = torch.stack(
        [torch.nn.functional.cosine_similarity(keys[4:stop, h // GROUP], q[h : h + 1], dim=-1) for h in range(heads)]
    )
    u = torch.tensor([[inclusion(method, c) for c in row] for row in cosine.tolist()])
    lists, each = (heads, 1) if share == "own" else (HEADS, GROUP)
    total = u.unflatten(0, (lists, each)).sum(1)
    met = torch.zeros(seeds, *total.shape, dtype=torch.float64)
    for n, draw in enumerate(draws(call, method, seeds)):
        for at in range(lists):
            slots = draw.lists.index[0, at, : int(draw.lists.count[0, at])].long()
            weight = draw.lists.log_weight
            assert weight is not None
            found = weight[0, at, : len(slots)].double().exp() * total[at, slots - 4]
            whole = found.round()  # the heads that sampled the key, of 1 or 3
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=0)
            assert bool(((whole >= 1) & (whole <= each)).all())
            met[n, at, slots - 4] = whole
    for low in (1e-3, 1e-2, 1e-1):
        decade = (total / each >= low) & (total / each < 10 * low)
        assert int(decade.sum()) > 20
        assert farthest(met[:, decade].sum(1) / total[decade].sum(), torch.ones(())) < 3
