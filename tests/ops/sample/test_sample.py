"""sample, reference and Numba, against its definition: probabilities by bisection, frequencies over many draws."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longreach.errors import InvalidInput
from longreach.ops import sample, uniforms


def inclusion(
    scores: list[float], count: int, uniform: float, power: float, first: int = 0, last: int = 0
) -> list[float]:
    """Each column's probability, from the definition, with c found by bisection."""
    n = len(scores)
    sure = set(range(n))
    if count < n:
        recent = set(range(max(0, n - min(last, count)), n))
        sure = recent | set([i for i in range(min(first, n)) if i not in recent][: count - len(recent)])
    left = [i for i in range(n) if i not in sure]
    weights = {i: max(0.0, scores[i]) ** power if math.isfinite(scores[i]) else 0.0 for i in left}
    whole = sum(weights.values())
    p = {i: (1 - uniform) * weights[i] / whole + uniform / len(left) if whole else 1 / len(left) for i in left}
    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if sum(min(1.0, middle * x) for x in p.values()) < count - len(sure) else (low, middle)
        )
    return [1.0 if i in sure else min(1.0, high * p[i]) for i in range(n)]


impls = pytest.mark.parametrize("impl", ["reference", "numba"])


@impls
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_case(impl: str, seed: int) -> None:
    dice = random.Random(seed)
    n, power, uniform = dice.randint(1, 40), dice.choice((0.5, 1.0, 2.0)), dice.choice((0.05, 0.5, 1.0))
    count, first, last = dice.randint(0, n + 2), dice.choice((0, 0, 3)), dice.choice((0, 0, 2))
    kinds = (0.0, 1e-30, 1.0, 1.0, float("nan"), float("inf"), -2.0)
    scores = [dice.choice((*kinds, dice.random() ** 8, dice.random())) for _ in range(n)]
    x = torch.full((1, 2, n + 5), torch.nan)
    x[0, :, :n] = torch.tensor(scores)
    draws = torch.tensor([[dice.random(), 0.0]])
    found = sample(
        x, torch.full((1, 2), count), torch.tensor([n]), draws, capacity=n + 5, uniform=uniform, power=power,
        first=first, last=last, impl=impl,
    )  # fmt: skip
    size = min(count, n)
    assert found.used.tolist() == [[size, size]]
    want = inclusion(scores, size, uniform, power, first, last)
    for head in range(2):
        index = found.columns[0, head, :size].tolist()
        assert index == sorted(set(index)) and all(0 <= i < n for i in index)
        assert {i for i, pi in enumerate(want) if pi > 1 - 1e-9} <= {*index} or size == 0
        got = found.log_weight[0, head, :size].double().neg().exp().tolist()
        assert got == pytest.approx([want[i] for i in index], rel=1e-5)
        assert found.factor[0, head, :size].tolist() == pytest.approx([1 - want[i] for i in index], abs=1e-6)


@impls
@pytest.mark.parametrize(("power", "first", "last"), [(1.0, 0, 0), (0.5, 2, 5)])
def test_frequencies_are_the_probabilities_and_sums_unbiased(impl: str, power: float, first: int, last: int) -> None:
    columns, count, times = 200, 30, 3000
    draw = torch.Generator().manual_seed(4)
    x = torch.rand(columns, generator=draw) ** 6
    value = torch.randn(columns, generator=draw, dtype=torch.float64)
    offset = uniforms(11, 2, torch.arange(times), torch.tensor([5]))
    found = sample(
        x.expand(times, 1, -1), torch.full((times, 1), count), torch.full((times,), columns), offset,
        capacity=count, power=power, first=first, last=last, impl=impl,
    )  # fmt: skip
    assert bool((found.used == count).all())
    seen = torch.zeros(columns, dtype=torch.float64)
    seen.index_add_(0, found.columns.flatten().long(), torch.ones(times * count, dtype=torch.float64))
    pi = torch.tensor(inclusion(x.tolist(), count, 0.05, power, first, last), dtype=torch.float64)
    z = (seen / times - pi) / (pi * (1 - pi) / times).clamp(min=1e-12).sqrt()
    assert bool((seen[pi == 1] == times).all()) and float(z.abs().max()) < 4.5
    sums = (value[found.columns[:, 0].long()] * found.log_weight[:, 0].double().exp()).sum(-1)
    assert abs(float(sums.mean() - value.sum())) < 4 * float(sums.std()) / times**0.5


@impls
def test_a_count_above_the_capacity_is_an_overflow(impl: str) -> None:
    zero = torch.zeros(1, 1)
    found = sample(torch.rand(1, 1, 9), torch.tensor([[5]]), torch.tensor([9]), zero, capacity=3, impl=impl)
    assert found.columns.shape == (1, 1, 3) and int(found.used) == 5
    nothing = torch.zeros(0, 2)
    none = sample(torch.rand(0, 2, 9), nothing.long(), torch.zeros(0).long(), nothing, capacity=3, impl=impl)
    assert none.columns.shape == (0, 2, 3)
    empty = sample(torch.rand(1, 1, 4), torch.tensor([[2]]), torch.tensor([0]), zero, capacity=3, impl=impl)
    assert int(empty.used) == 0


def test_uniforms_follow_from_what_they_are_drawn_for() -> None:
    pos, heads = torch.arange(5000), torch.arange(4)
    u = uniforms(0, 7, pos, heads)
    assert u.shape == (5000, 4) and bool(((u >= 0) & (u < 1)).all())
    assert torch.equal(uniforms(0, 7, pos[100:110], heads[2:]), u[100:110, 2:])
    several = uniforms(0, torch.tensor([3, 7]), pos, heads)
    assert several.shape == (2, 5000, 4) and torch.equal(several[1], u)
    others = [uniforms(1, 7, pos, heads), uniforms(0, 8, pos, heads), u.roll(1, 0), u.roll(1, 1)]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1])) < 0.03
    assert float((u.mean(0) - 0.5).abs().max()) < 4 * 12**-0.5 / 5000**0.5
    assert len(u.flatten().unique()) > 19_990


GIVEN: dict[str, Any] = {
    "x": torch.rand(2, 3, 9), "count": torch.full((2, 3), 4), "length": torch.tensor([9, 5]),
    "offset": torch.rand(2, 3), "capacity": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.rand(3, 9)}, r"x: expected float \[L, heads, N\]"),
        ({"x": torch.ones(2, 3, 9).long()}, "x: expected float"),
        ({"count": torch.full((2,), 4)}, r"count: expected int32 or int64 \[L=2, heads=3\]"),
        ({"length": torch.tensor([9.0, 5.0])}, "length: expected int32 or int64"),
        ({"length": torch.tensor([10, 5])}, r"length: expected in \[0, N=9\], got 5 to 10"),
        ({"offset": torch.rand(2, 1)}, "offset: expected float"),
        ({"offset": torch.ones(2, 3)}, r"offset: expected in \[0, 1\), got 1"),
        ({"offset": torch.rand(2, 3, device="meta")}, "offset: expected on cpu like x"),
        ({"capacity": 0}, "capacity: expected an int >= 1, got 0"),
        ({"first": -1}, "first: expected an int >= 0, got -1"),
        ({"uniform": 0}, r"uniform: expected a number in \(0, 1\], got 0"),
        ({"uniform": "a"}, r"uniform: expected a number in \(0, 1\], got 'a'"),
        ({"power": 4.5}, r"power: expected a number in \(0, 4\], got 4.5"),
        ({"first": True}, "first: expected an int >= 0, got True"),
        ({"power": 0}, r"power: expected a number in \(0, 4\], got 0"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        sample(**(GIVEN | wrong))
