"""The Triton kernels of scan: in Python on a CPU, for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops.scan import ScanCarry, scan, triton
from longreach.ops.triton_launches import Observed, observe_launches
from tests.ops.attend.kernels import HALF, here, needs_gpu
from tests.ops.scan.cases import Case, brute, case, near, run, wide
from tests.ops.scan.test_scan import stays


def agrees(some: Case, *, forgets: bool = True) -> None:
    """With the definition, and the gradients with those of the reference in fp64."""
    dtype = some.x.dtype
    got, want = run(some, "triton", forgets=forgets), run(wide(some), "reference", forgets=forgets)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for a, b in zip(got, (*brute(some, forgets=forgets), *want[3:]), strict=True):
        near(a, b, dtype)


def follows(some: Case) -> None:
    """The reference in fp64, whose time grows with the rows only."""
    for a, b in zip(run(some, "triton"), run(wide(some), "reference"), strict=True):
        near(a, b, some.x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("dim", [8, 20])
@pytest.mark.covering
def test_definition(dtype: torch.dtype, forgets: bool, dim: int) -> None:
    agrees(case(dim=dim, dtype=dtype, seed=1), forgets=forgets)


def test_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CHUNKS", (64, 64))
    agrees(case(heads=1))


def test_long_sequences_pass_through_many_chunks() -> None:
    """Of which some have no row of their own to start from."""
    rows = 6 * triton.CHUNKS[1] + 1
    seq, pos = torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)
    pos[3 * triton.CHUNKS[1]] = 0
    x, mean = torch.randn(rows, 1, 8), torch.randn(1, 1, 8)
    follows(Case(x, torch.tensor([0.98]), seq, pos, ScanCarry(mean, torch.tensor([[3.0]]))))


@pytest.mark.parametrize("decay", [1 - 1e-4, 1 - 2.0**-20, 1e-3])
def test_extreme_decays_over_thousands_of_rows(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CHUNKS", (256, 256))
    rows = 3000
    start = ScanCarry(torch.randn(1, 1, 4), torch.tensor([[70.0]]))
    x, pos = torch.randn(rows, 1, 4) + 1, torch.arange(1, rows + 1)
    follows(Case(x, torch.tensor([decay]), torch.zeros(rows, dtype=torch.int64), pos, start))


SIZES = {
    "borders of pieces": [15, 1, 16, 17, 31, 32, 33],
    "padding in a piece": [5, -3, 7, -40, 9, -1, 1, -16, 20],
    "one row each": [1] * 12,
    "one row each in several chunks": [1] * 70,
    "padding around": [-35, 3, -70],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 24), (HALF, 80)])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.covering("sizes", "carried")
def test_sequences_of_any_size(sizes: list[int], dtype: torch.dtype, dim: int, carried: bool) -> None:
    """Negative sizes: rows of padding."""
    seq = torch.cat([torch.full((abs(n),), b if n > 0 else -1) for b, n in enumerate(sizes)])
    pos = torch.cat([torch.arange(abs(n)) + 9 * carried for n in sizes])
    shape = len(sizes) + 1, 2
    carry = ScanCarry(torch.randn(*shape, dim), 1 + torch.rand(shape))
    follows(Case(torch.randn(len(seq), 2, dim).to(dtype), torch.tensor([0.3, 0.97]), seq, pos, carry))


@pytest.mark.parametrize("rate", [0.5, 0.99])
def test_the_gradient_of_a_decay_where_rows_have_an_offset(rate: float) -> None:
    """As keys with a bias have: rows and means are large, their difference is not."""
    draw, rows = torch.Generator().manual_seed(2), 300
    offset = 100 * torch.randn(64, generator=draw)
    x, carry = (
        offset + torch.randn(rows, 1, 64, generator=draw),
        ScanCarry(offset.view(1, 1, 64), torch.tensor([[3.0]])),
    )
    seq, pos = torch.zeros(rows, dtype=torch.int64), torch.arange(1, rows + 1)
    some = Case(x.to(HALF), torch.tensor([rate]), seq, pos, carry)
    want = run(wide(some), "reference")[-1]
    errors = [float((run(some, impl)[-1].double() - want).abs()) for impl in ("triton", "reference")]
    assert errors[0] <= 2 * errors[1] + 2.0**-20 * 100 * rows


def test_channels_of_several_programs() -> None:
    agrees(case(dim=2 * triton.BLOCK // 4 + 8))


def test_padding_with_nan_between_sequences() -> None:
    seq = torch.tensor([0] * 5 + [-1] * 30 + [1] * 20)
    x = torch.randn(55, 1, 8)
    some = Case(x, torch.tensor([0.9]), seq, torch.arange(55), ScanCarry.empty(2, 1, 8))
    bad = some._replace(x=x.masked_fill((seq < 0)[:, None, None], torch.nan))
    for a, b in zip(run(bad, "triton"), run(some, "triton"), strict=True):
        assert torch.equal(a, b)


FEW_ROWS = {
    "one row each": [1] * 9,
    "several rows and padding": [3, -2, 1, 7, -1, 2],
    "one row": [1],
    "padding": [-4],
}


@pytest.mark.parametrize("sizes", FEW_ROWS.values(), ids=FEW_ROWS)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 24), (HALF, 2 * triton.BLOCK // 4 + 8)])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.covering
def test_few_rows_without_gradients_take_one_kernel(
    sizes: list[int], dtype: torch.dtype, dim: int, forgets: bool
) -> None:
    """Negative sizes: rows of padding. Two sequences have no rows, and the carry of one that starts again is NaN."""
    seq = torch.cat([torch.full((abs(n),), len(sizes) - b if n > 0 else -1) for b, n in enumerate(sizes)])
    pos = torch.cat([torch.arange(abs(n)) + (5 if b % 3 else 0) for b, n in enumerate(sizes)])
    shape = len(sizes) + 2, 2
    carry = ScanCarry(torch.randn(*shape, dim), 1 + torch.rand(shape))
    starts = seq[(pos == 0) & (seq >= 0)]
    bad = ScanCarry(carry.mean.clone(), carry.weight.clone())
    bad.mean[starts], bad.weight[starts] = torch.nan, torch.nan
    some = Case(torch.randn(len(seq), 2, dim).to(dtype), torch.tensor([0.3, 0.97]), seq, pos, carry)
    launches = list[Observed]()
    with torch.no_grad(), observe_launches(launches.append):
        y, after = scan(
            here(some.x), here(some.decay) if forgets else None, here(seq), here(pos), here(bad), impl="triton"
        )
    assert [x.function.__name__ for x in launches] == ["few"]
    for got, want in zip((y, after.mean, after.weight), brute(some, forgets=forgets), strict=True):
        near(got.cpu(), want, dtype)
    assert torch.equal(y[here(pos == 0)].cpu(), some.x.masked_fill((seq < 0)[:, None, None], 0)[pos == 0])
    rest = torch.ones(shape[0], dtype=torch.bool).index_fill(0, seq.clamp(min=0)[seq >= 0], False)
    assert torch.equal(after.mean.cpu()[rest], carry.mean[rest])


def test_a_sequence_that_starts_again_within_few_rows() -> None:
    x, pos = torch.randn(9, 1, 8), torch.tensor([3, 4, 0, 1, 2, 3, 0, 1, 2])
    some = Case(x, torch.tensor([0.8]), torch.zeros_like(pos), pos, ScanCarry(torch.randn(1, 1, 8), torch.ones(1, 1)))
    y, after = scan(*(here(t) for t in some), impl="triton")
    for got, want in zip((y, after.mean, after.weight), brute(some), strict=True):
        near(got.cpu(), want, torch.float32)


def test_strided_rows_are_read_in_place() -> None:
    some = case()
    x = torch.randn(38, 3, 16)[:, 1:, 4:12]
    got, _ = scan(here(x), *(here(t) for t in some[1:]), impl="triton")
    want, _ = scan(x, *some[1:], impl="reference")
    near(got.cpu(), want, torch.float32)


def test_nan_of_one_sequence_stays_in_it() -> None:
    stays("triton")


def test_only_what_is_wanted() -> None:
    """A decay that is not learnt, and a loss of the state alone."""
    some = Case(*(here(t) for t in case()))
    x = some.x.clone().requires_grad_()
    _, after = scan(x, *some[1:], impl="triton")
    (got,) = torch.autograd.grad(after.mean.sum(), x)
    y = case().x.requires_grad_()
    (want,) = torch.autograd.grad(scan(y, *case()[1:], impl="reference")[1].mean.sum(), y)
    near(got.cpu(), want, torch.float32)


def test_no_rows() -> None:
    some = Case(*(here(t) for t in case()))
    mean = some.carry.mean.clone().requires_grad_()
    none = some.seq[:0]
    _, after = scan(some.x[:0], some.decay, none, none, ScanCarry(mean, some.carry.weight), impl="triton")
    (got,) = torch.autograd.grad(after.mean.sum(), mean)
    assert torch.equal(got, torch.ones_like(got))


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        scan(*(here(t) for t in case(dtype=torch.float64)), impl="triton")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forgets", [True, False])
def test_long_on_a_gpu(dtype: torch.dtype, forgets: bool) -> None:
    """Many chunks, and the same bits at each call."""
    draw, rows = torch.Generator().manual_seed(0), 5000
    seq = torch.arange(rows) // 2000
    x = torch.randn(rows, 8, 128, generator=draw).to(dtype)
    some = Case(x, torch.linspace(0.5, 0.9993, 8), seq, torch.arange(rows) % 1700, ScanCarry.empty(3, 8, 128))
    got, want = run(some, "triton", forgets=forgets), run(wide(some), "reference", forgets=forgets)
    for a, b in zip(got, want, strict=True):
        near(a, b, dtype)
    assert all(torch.equal(a, b) for a, b in zip(got, run(some, "triton", forgets=forgets), strict=True))
