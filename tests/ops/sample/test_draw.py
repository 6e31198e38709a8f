"""Columns drawn independently, against loops."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.ops.sample import draw, uniforms

impls = pytest.mark.parametrize("impl", ["reference", "numba"])
ROW = torch.zeros(1, 1, 5)
ONE = torch.ones(1, 1, dtype=torch.int64)
LENGTH = torch.tensor([5])


@impls
def test_draws_are_those_of_the_distribution_function(impl: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 3, 30) * (torch.rand(4, 3, 30) > 0.4)
    x[1, 2], x[2, 0, 3], x[2, 1, 4], x[3, 1, 0], x[0, 1, 7] = 0, torch.nan, -1, torch.inf, torch.inf
    length, count = torch.tensor([30, 17, 22, 1]), torch.randint(0, 40, (4, 3))
    numbers = torch.rand(4, 3, 40)
    found = draw(x, count, length, numbers, impl=impl)
    for r in range(4):
        for h in range(3):
            p = x[r, h, : int(length[r])].double().nan_to_num(0, posinf=0).clamp(min=0)
            p = (p if p.sum() > 0 else torch.ones_like(p)) / (p.sum() if p.sum() > 0 else len(p))
            edges, n = p.cumsum(0).tolist(), int(count[r, h])
            hits = Counter(bisect.bisect_right(edges, u) for u in numbers[r, h, :n].double().tolist())
            used = int(found.used[r, h])
            assert found.columns[r, h, :used].tolist() == sorted(hits)
            want = [math.log(hits[i] / (n * float(p[i]))) for i in sorted(hits)]
            assert found.log_weight[r, h, :used].tolist() == pytest.approx(want, abs=1e-5)
            assert found.factor[r, h, :used].tolist() == pytest.approx([1 / hits[i] for i in sorted(hits)])
            assert all(p[i] > 0 for i in hits)


@impls
def test_sums_are_unbiased_and_weights_of_equal_scores_are_theirs(impl: str) -> None:
    torch.manual_seed(1)
    x, value, draws, rows = torch.rand(20), torch.randn(20), 8, 20_000
    numbers = uniforms(0, 0, torch.arange(rows), torch.arange(draws))[:, None]
    count, length = torch.full((rows, 1), draws), torch.full((rows,), 20)
    found = draw(x.expand(rows, 1, -1), count, length, numbers, impl=impl)
    used = torch.arange(draws) < found.used[..., None]
    index = torch.where(used, found.columns, 0).long()
    sums = (torch.where(used, found.log_weight, -torch.inf).exp() * value[index]).sum((1, 2)).double()
    error = float(sums.std()) / math.sqrt(rows)
    assert abs(float(sums.mean() - value.sum())) < 4 * error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numbers": torch.ones(1, 1, 3)}, r"numbers: expected in \[0, 1\), got 1.0 to 1.0"),
        ({"numbers": torch.zeros(1, 1)}, r"numbers: expected float \[L=1, heads=1, C\], got"),
        ({"numbers": torch.zeros(1, 2, 3)}, r"numbers: expected float \[L=1, heads=1, 3\], got"),
        ({"length": torch.tensor([6])}, r"length: expected in \[0, N=5\], got 6 to 6"),
        ({"count": torch.ones(1, 1)}, "count: expected int32 or int64"),
        ({"x": torch.zeros(1, 5)}, "x: expected float"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    given = {"x": ROW, "count": ONE, "length": LENGTH, "numbers": torch.zeros(1, 1, 3), **change}
    with pytest.raises(InvalidInput, match=message):
        draw(**given)


def test_no_columns_and_no_draws() -> None:
    assert draw(torch.zeros(1, 1, 0), ONE, torch.tensor([0]), torch.zeros(1, 1, 3)).used.tolist() == [[0]]
    assert draw(ROW, 0 * ONE, LENGTH, torch.zeros(1, 1, 3)).used.tolist() == [[0]]
    assert draw(ROW, 9 * ONE, LENGTH, torch.zeros(1, 1, 3)).log_weight[0, 0, 0] == pytest.approx(math.log(5), abs=1e-6)
