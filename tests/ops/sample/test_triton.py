"""sample's kernels against the definition and the reference: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops import sample
from longreach.ops.sample import splitting
from longreach.ops.sample import triton as kernels
from longreach.ops.sample.api import Sampled
from longreach.ops.sample.triton import Tuning
from tests.ops.attend.kernels import HALF, PLACE, here
from tests.ops.sample.test_sample import inclusion

# rows of a few hundred columns are split
SPLIT = Tuning(
    short=0, parts=3, tile=64, counted=64, warps=1, whole=64, whole_counted=32, whole_warps=1, chained=PLACE == "cuda"
)
WHOLE = replace(SPLIT, short=1 << 24)
tunings = pytest.mark.parametrize("tune", [WHOLE, SPLIT], ids=["whole", "split"])


def drawn(
    x: Tensor, count: Tensor, length: Tensor, offset: Tensor, tune: Tuning | None, **options: Any
) -> tuple[Sampled, dict[str, Any]]:
    """What the kernels draw, on the CPU, and the options in full."""
    full = {"capacity": x.shape[2], "uniform": 0.05, "power": 1.0, "first": 0, "last": 0, **options}
    got = kernels.sample(here(x), here(count), here(length), here(offset), **full, tune=tune)
    return Sampled(*(each.cpu() for each in got)), full


def check(x: Tensor, count: Tensor, length: Tensor, offset: Tensor, tune: Tuning | None, **options: Any) -> None:
    """Holds the kernels to the reference: the same columns, weights and factors of rows that do not overflow."""
    got, full = drawn(x, count, length, offset, tune, **options)
    want = sample(x, count, length, offset, **full, impl="reference")
    assert torch.equal(got.used, want.used)
    used = torch.where(want.used <= full["capacity"], want.used, 0)[..., None]
    there = torch.arange(full["capacity"]) < used
    assert torch.equal(got.columns[there], want.columns[there])
    torch.testing.assert_close(got.log_weight[there], want.log_weight[there], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.factor[there], want.factor[there], rtol=1e-5, atol=1e-6)


@tunings
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_case(tune: Tuning, seed: int) -> None:
    """Probabilities by bisection; lists ascend and have the count's length; what lies past the length is poison."""
    dice = random.Random(seed)
    n, power, uniform = dice.choice((1, 2, 40, 150)), dice.choice((0.5, 1.0, 2.0)), dice.choice((1e-6, 0.05, 1.0))
    n = dice.randint(1, n)
    count, first, last = dice.randint(0, n + 2), dice.choice((0, 0, 3)), dice.choice((0, 0, 2))
    kinds = (0.0, 1e-30, 1.0, 1.0, float("nan"), float("inf"), -2.0, -float("inf"))
    scores = [dice.choice((*kinds, dice.random() ** 8, dice.random())) for _ in range(n)]
    x = torch.full((1, 2, n + 5), torch.nan)
    x[0, :, :n] = torch.tensor(scores)
    offset = torch.tensor([[dice.random(), 0.0]], dtype=torch.float64)
    got, _ = drawn(
        x, torch.full((1, 2), count), torch.tensor([n]), offset, tune, uniform=uniform, power=power, first=first,
        last=last,
    )  # fmt: skip
    size = min(count, n)
    assert got.used.tolist() == [[size, size]]
    want = inclusion(scores, size, uniform, power, first, last)
    for head in range(2):
        index = got.columns[0, head, :size].tolist()
        assert index == sorted(set(index)) and all(0 <= i < n for i in index)
        assert {i for i, pi in enumerate(want) if pi > 1 - 1e-9} <= {*index} or size == 0
        pi = got.log_weight[0, head, :size].double().neg().exp().tolist()
        assert pi == pytest.approx([want[i] for i in index], rel=1e-5)
        assert got.factor[0, head, :size].tolist() == pytest.approx([1 - want[i] for i in index], abs=1e-6)


@tunings
@pytest.mark.parametrize(("power", "first", "last"), [(1.0, 0, 0), (0.5, 2, 5)])
def test_offsets_that_draw_a_column_take_its_probability(tune: Tuning, power: float, first: int, last: int) -> None:
    """They are an interval of [0, 1), taken as a circle, so of evenly spaced ones it holds as many, to within one."""
    columns, count, times = 200, 30, 64
    draw = torch.Generator().manual_seed(4)
    x = torch.rand(columns, generator=draw) ** 6
    offset = (torch.arange(times, dtype=torch.float64)[:, None] + 0.37) / times
    got, _ = drawn(
        x.expand(times, 1, -1), torch.full((times, 1), count), torch.full((times,), columns), offset, tune,
        capacity=count, power=power, first=first, last=last,
    )  # fmt: skip
    seen = torch.zeros(columns, dtype=torch.float64)
    seen.index_add_(0, got.columns.flatten().long(), torch.ones(times * count, dtype=torch.float64))
    pi = torch.tensor(inclusion(x.tolist(), count, 0.05, power, first, last), dtype=torch.float64)
    assert float((seen - times * pi).abs().max()) <= 1 + 1e-6
    assert bool((seen[pi == 1] == times).all())


@tunings
@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
def test_the_references_sample(tune: Tuning, dtype: torch.dtype) -> None:
    """Scores of many magnitudes, ragged rows, counts of all kinds, a list too short for one of them."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 500, generator=draw).mul(torch.tensor([0.5, 2.0, 4.0])[:, None]).exp().to(dtype)
    x[1, 2, 7], x[2, 0, 3], x[2, 1, 100:] = torch.nan, -torch.inf, 0
    length = torch.tensor([500, 333, 1, 0], dtype=torch.int32)
    count = torch.tensor([[50, 499, 3], [200, 7, 333], [1, 0, 5], [4, -3, 0]])
    offset = torch.rand(4, 3, generator=draw, dtype=torch.float64)
    for options in ({}, {"first": 4, "last": 20}, {"power": 0.5, "uniform": 0.3}, {"power": 1.5, "capacity": 250}):
        check(x, count, length, offset, tune, **options)
    check(x, count.int(), length.long(), offset.float(), tune, last=600)


def test_thresholds_that_take_more_rounds() -> None:
    """Rows that one pass does not settle: the kernel that writes looks further, and writes the same."""
    draw = torch.Generator().manual_seed(2)
    ties = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(75)
    steps = 1.07 ** torch.arange(300)  # each column of another magnitude
    x = torch.stack([ties, steps, steps.flip(0), torch.rand(300, generator=draw) ** 20])[None]
    count, offset = torch.tensor([[150, 60, 200, 90]]), torch.rand(1, 4, generator=draw)
    for rounds in (1, 2, 5):
        check(x, count, torch.tensor([300]), offset, replace(SPLIT, rounds=rounds), first=2)


def test_memory_of_any_layout() -> None:
    memory = torch.rand(2, 600, 3)
    x = memory[:, 3:].transpose(1, 2)  # columns are not contiguous
    count = torch.tensor([[100, 7, 90], [20, 8, 300]])[:, ::2]
    length = torch.tensor([[597, 0], [203, 0]])[:, 0]
    offset = torch.rand(2, 3)[:, ::2]
    for tune in (WHOLE, SPLIT, None):
        check(x[:, ::2], count, length, offset, tune, last=2)


def test_a_million_columns() -> None:
    """No sum or product exceeds 63 bits, and lists are complete: as many columns as counted, each once."""
    draw = torch.Generator().manual_seed(3)
    columns = (1 << 20) + 3
    x = torch.randn(1, 3, columns, generator=draw).mul(3).exp()
    x[0, 2] = 1
    count = torch.tensor([[50_000, columns - 1, 700_000]])
    tune = Tuning(parts=5, tile=1 << 15, counted=1 << 14, chained=False) if PLACE == "cpu" else None
    offset = torch.rand(1, 3, generator=draw, dtype=torch.float64)
    got, full = drawn(x, count, torch.tensor([columns]), offset, tune)
    want = sample(x, count, torch.tensor([columns]), offset, **full, impl="reference")
    for head, size in enumerate(count[0].tolist()):
        index = got.columns[0, head, :size]
        assert bool((index[1:] > index[:-1]).all()) and int(index[0]) >= 0 and int(index[-1]) < columns
        both = index == want.columns[0, head, :size]
        assert float(both.double().mean()) > 0.999  # columns at which sums are next to a whole number may differ
        mine, its = (found.log_weight[0, head, :size][both] for found in (got, want))
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


@tunings
def test_nothing_at_all(tune: Tuning) -> None:
    for shape in ((0, 2, 5), (2, 0, 5), (2, 1, 0)):
        zeros = torch.zeros(shape[:2])
        got, _ = drawn(torch.zeros(shape), zeros.long() + 1, torch.zeros(shape[0]).long(), zeros, tune, capacity=3)
        assert got.columns.shape == (*shape[:2], 3) and not got.used.any()


@tunings
def test_what_memory_held_before_does_not_matter(tune: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results' memory included; entries past a list's end are not written."""
    x = torch.rand(1, 4, 300) ** 4
    count, length, offset = torch.tensor([[100, 130, 0, 250]]), torch.tensor([260]), torch.rand(1, 4)
    plain = torch.empty
    for filling in (0, -1, 0x55):
        monkeypatch.setattr(torch, "empty", lambda *size, filling=filling, **how: plain(*size, **how).fill_(filling))
        check(x, count, length, offset, tune, first=5, last=3)
        got, _ = drawn(x, count, length, offset, tune)
        past = torch.arange(300) >= got.used[..., None]
        assert bool((got.columns[past] == filling).all() & (got.log_weight[past] == filling).all())


def test_what_is_allocated_is_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = torch.empty, list[int]()

    def empty(*size: Any, **how: Any) -> Tensor:
        made = plain(*size, **how)
        found.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    for rows, columns, capacity in ((3, 300, 40), (2, splitting.SHORT, 7), (3, splitting.SHORT + 1, 40)):
        found.clear()
        one = torch.ones(rows, 1)
        drawn(torch.ones(rows, 1, columns), one.long(), one[:, 0].long(), 0 * one, None, capacity=capacity)
        assert sum(found) == splitting.workspace_bytes(rows, columns) + 4 * rows * (3 * capacity + 1)


def test_what_these_kernels_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> None:
        one = torch.ones(1, 1, device=x.device)
        sample(x, one.long(), one[0].long(), 0 * one, capacity=1, impl="triton")

    with pytest.raises(Unsupported, match="sample's Triton kernels have no backward pass and an input requires"):
        run(torch.zeros(1, 1, 3, device=PLACE, requires_grad=True))
    with pytest.raises(Unsupported, match="take at most 16777216 columns, got 16777217; use impl='reference'"):
        run(torch.zeros(1, device=PLACE).expand(1, 1, (1 << 24) + 1))
    if PLACE == "cpu":
        with pytest.raises(Unsupported, match="the interpreter gets bf16 wrong"):
            run(torch.zeros(1, 1, 3, dtype=torch.bfloat16))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="run on CUDA devices, got cpu; use impl='reference'"):
        run(torch.zeros(1, 1, 3))
