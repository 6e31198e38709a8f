"""Weights of the levels: routing, gates, masked levels, straight-through gradients, shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longreach.mka.config import MKAConfig
from longreach.mka.levels import Levels
from longreach.mka.router import Router, at_least_zero
from longreach.ops import HeadShard

HEADS, DIM = 6, 8


def router(gate: float = 1.0, variant: str = "mka", **options: object) -> Router:
    torch.manual_seed(0)
    return Router(MKAConfig.make(variant, **options), HEADS, DIM, gate)


def queries(rows: int = 9) -> Tensor:
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("routing", ["learned", "fixed", "top1", "top2"])
def test_at_gate_1_the_weights_are_lambda(routing: str) -> None:
    there = torch.arange(9) % 2 == 0
    weights = router(routing=routing)(queries(), there)
    assert weights.shape == (9, 3) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    assert bool((weights[~there, 2] == 0).all())  # masked before the softmax: the others sum to 1
    used = (weights > 1e-6).sum(-1)
    most = {"learned": 3, "fixed": 3, "top1": 1, "top2": 2}[routing]
    assert used.tolist() == [min(most, 3 if some else 2) for some in there.tolist()]
    if routing == "fixed":
        torch.testing.assert_close(weights[1], torch.tensor([0.5, 0.5, 0.0]))


def test_gates_move_from_the_start_to_lambda_and_past_it() -> None:
    there = torch.ones(9, dtype=torch.bool)
    routed = router(1.0)(queries(), there)
    start = torch.tensor([1.0, 0.0, 0.0])
    assert torch.equal(router(0.0)(queries(), there), start.expand(9, 3))
    torch.testing.assert_close(router(3.0)(queries(), there), start + 3 * (routed - start))
    block = router(0.0, "block_mka")(queries(), torch.arange(9) < 4)
    assert block[:4].tolist() == [[1.0, 0.0, 1.0]] * 4 and block[4:].tolist() == [[1.0, 0.0, 0.0]] * 5


def test_block_mka_without_blocks_has_its_window_alone() -> None:
    weights = router(1.0, "block_mka")(queries(), torch.zeros(9, dtype=torch.bool))
    assert weights.tolist() == [[1.0, 0.0, 0.0]] * 9


def test_hard_routing_has_the_gradients_of_the_softmax() -> None:
    there = torch.ones(9, dtype=torch.bool)
    found = []
    for routing in ("learned", "top1"):
        one = router(routing=routing)
        (one(queries(), there) * torch.tensor([0.3, -1.0, 2.0])).sum().backward()
        found.append(one.up.weight.grad)
    assert torch.equal(found[0], found[1]) and float(found[0].abs().max()) > 0


def test_negative_weights_of_a_mixture_are_0_and_keep_their_gradient() -> None:
    weights = torch.tensor([0.5, -0.25, 0.0], requires_grad=True)
    kept = at_least_zero(weights)
    assert kept.tolist() == [0.5, 0.0, 0.0]
    kept.sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_row_without_a_weight_above_0_has_level_1() -> None:
    weights = torch.tensor([[-0.5, -0.25, 0.0], [-0.5, 0.5, -1.0], [0.0, 0.0, 0.0]], requires_grad=True)
    kept = at_least_zero(weights)
    assert kept.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [1.0, 0.0, 0.0]]
    assert torch.equal(at_least_zero(weights.detach()), kept)
    kept.sum().backward()
    assert weights.grad is not None and bool((weights.grad == 1).all())
    assert bool(at_least_zero(torch.tensor([-1.0, torch.nan])).isnan().any())


def test_ranks_agree_with_one() -> None:
    whole, q, there = router(), queries(), torch.ones(9, dtype=torch.bool)
    hidden = list[Tensor]()
    for first in (0, 1, 2):  # the sum of what the other ranks give is known from a first round
        whole(q[:, 2 * first : 2 * first + 2], there, HeadShard(first, 1, 3, lambda x: hidden.append(x) or x))
    total = torch.stack(hidden).sum(0)
    got = whole(q[:, 2:4], there, HeadShard(1, 1, 3, lambda x: total))
    torch.testing.assert_close(got, whole(q, there))


def test_first_decays_are_spread_and_stay_between_0_and_1() -> None:
    levels = Levels(MKAConfig.make("fastmka"), 0, 8, 8, DIM)
    rate = levels.rate()
    assert rate is not None and bool((rate.diff() > 0).all())
    half_life = -1 / torch.log2(rate.detach())
    torch.testing.assert_close(half_life[[0, -1]], torch.tensor([1.0, 1024.0]), rtol=1e-3, atol=0)
    torch.testing.assert_close(Levels(MKAConfig.make("fastmka", decay=0.9), 0, 2, 2, DIM).rate(), torch.full((2,), 0.9))
    with torch.no_grad():
        levels.decay.bias.fill_(1e4)
    assert bool((levels.rate() < 1).all())
    assert Levels(MKAConfig.make("fastmka", summary="mean"), 0, 2, 2, DIM).rate() is None
