"""The bounds hold by construction elsewhere; here: they are tight enough to see what matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.ops import Partial, Spans, attend
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import Exact, exact_attend
from longreach.testing.tolerance import assert_close, bounds


@pytest.fixture
def problem() -> tuple[Partial, Exact]:
    kv = random_kv([50, 0], heads=2, dim=64)
    rows = random_rows(kv, 8)
    return attend(rows, kv, Spans.dense(), scale=0.125), exact_attend(rows, kv, Spans.dense(), scale=0.125)


def test_bounds_are_of_rounding_size(problem: tuple[Partial, Exact]) -> None:
    out, lse = bounds(problem[1], 2**-24)
    assert float(out.max()) < 3e-4 and float(lse.max()) < 1e-4


def test_exact_passes_and_errors_do_not(problem: tuple[Partial, Exact]) -> None:
    got, want = problem
    assert_close(got, want)
    seen = (~got.is_empty).nonzero()[0].tolist()
    worse = got.out.clone()
    worse[*seen, 5] += 1e-3
    with pytest.raises(AssertionError, match="out: 1 of"):
        assert_close(Partial(worse, got.lse), want)
    with pytest.raises(AssertionError, match=r"lse: .* beyond the bound"):
        assert_close(Partial(got.out, got.lse * (1 + 1e-4)), want)
    with pytest.raises(AssertionError, match="beyond"):
        assert_close(Partial(torch.full_like(got.out, torch.nan).where(~got.is_empty[..., None], 0.0), got.lse), want)


def test_rows_without_keys_are_held_to_zero(problem: tuple[Partial, Exact]) -> None:
    got, want = problem
    empty = got.is_empty
    assert bool(empty.any())
    with pytest.raises(AssertionError, match="over no keys"):
        assert_close(Partial(got.out + 1e-30 * empty[..., None], got.lse), want)
    with pytest.raises(AssertionError, match="-inf"):
        assert_close(Partial(got.out, got.lse.masked_fill(empty, -1e30)), want)


def test_bf16_arithmetic_is_seen(problem: tuple[Partial, Exact]) -> None:
    got, want = problem
    with pytest.raises(AssertionError, match="beyond"):
        assert_close(replace(got, out=got.out.bfloat16().float()), want)
