"""scan: its definition, its carry, its gradients, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.ops.scan import ScanCarry, scan
from longreach.ops.scan.reference import CHUNK
from tests.ops.scan.cases import brute, case, run


@pytest.mark.parametrize("forgets", [True, False])
def test_definition(forgets: bool) -> None:
    some = case(dtype=torch.float64)
    want = brute(some, forgets=forgets)
    for got, expected in zip(run(some, "reference", forgets=forgets), want, strict=False):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_first_token_is_its_own_mean_and_padding_is_zero() -> None:
    some = case()
    y, _ = scan(some.x, some.decay, some.seq, some.pos, some.carry)
    starts = (some.pos == 0) & (some.seq >= 0)
    assert torch.equal(y[starts], some.x[starts]) and not y[some.seq < 0].any()


@pytest.mark.parametrize("forgets", [True, False])
def test_in_parts_as_in_one_call(forgets: bool) -> None:
    """Chunks of any size and single tokens, over more rows than one chunk of the reference."""
    x, seq = torch.randn(2 * CHUNK + 5, 2, 4, dtype=torch.float64), torch.zeros(2 * CHUNK + 5, dtype=torch.int64)
    pos, decay = torch.arange(len(seq)), torch.tensor([0.5, 0.999], dtype=torch.float64) if forgets else None
    start = ScanCarry.empty(1, 2, 4, dtype=torch.float64)
    whole, after = scan(x, decay, seq, pos, start)
    for sizes in ([CHUNK + 1, CHUNK + 4], [1] * 7 + [2 * CHUNK - 2]):
        outs, carry = [], start
        for rows in torch.arange(len(seq)).split(sizes):
            y, carry = scan(x[rows], decay, seq[rows], pos[rows], carry)
            outs.append(y)
        torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((carry.mean, carry.weight), (after.mean, after.weight), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("forgets", [True, False])
def test_gradients(forgets: bool) -> None:
    some = case(dim=2, dtype=torch.float64)

    def outputs(x: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor, *decay: torch.Tensor) -> Any:
        y, after = scan(x, decay[0] if decay else None, some.seq, some.pos, ScanCarry(mean, weight))
        return y, after.mean, after.weight

    leaves = (some.x, *vars(some.carry).values(), *([some.decay] if forgets else []))
    assert torch.autograd.gradcheck(outputs, [x.clone().requires_grad_() for x in leaves], fast_mode=True)


def test_no_rows_and_no_sequences() -> None:
    some = case()
    none = some.seq[:0]
    y, after = scan(some.x[:0], some.decay, none, none, some.carry)
    assert y.shape == (0, 2, 8) and torch.equal(after.mean, some.carry.mean)
    y, after = scan(some.x[:2], some.decay, some.seq[:2], some.pos[:2], ScanCarry.empty(0, 2, 8))
    assert not y.any() and after.mean.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 8)}, r"x: expected \[R, G, D\]"),
        ({"x": torch.zeros(3, 2, 8).long()}, "x: expected bf16, fp16, fp32 or fp64"),
        ({"seq": torch.zeros(4).long()}, r"seq: expected int32 or int64 \[R=38\]"),
        ({"pos": torch.zeros(38)}, r"pos: expected int32 or int64 \[R=38\]"),
        ({"carry": None}, "carry: expected a ScanCarry"),
        ({"carry": ScanCarry.empty(5, 2, 4)}, r"carry: expected a mean torch.float32 \[B, 2, 8\]"),
        ({"carry": ScanCarry.empty(5, 2, 8, dtype=torch.float64)}, "carry: expected a mean torch.float32"),
        ({"decay": torch.ones(3)}, r"decay: expected float \[G=2\]"),
        ({"decay": torch.tensor([0.5, 1.0])}, r"decay: expected values in \(0, 1\), got .*; None is a mean"),
        ({"decay": torch.tensor([0.0, 0.5])}, r"decay: expected values in \(0, 1\)"),
        ({"decay": torch.tensor([torch.nan, 0.5])}, r"decay: expected values in \(0, 1\)"),
        ({"seq": torch.full((38,), 5)}, "seq: expected below the 5 sequences of carry, got 5"),
        ({"seq": torch.arange(38) % 2}, "seq: expected the rows of each sequence to be consecutive"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given = case()._replace(**change)
    with pytest.raises(InvalidInput, match=message):
        scan(*given)


def test_bad_carry_and_unknown_impl() -> None:
    some = case()
    with pytest.raises(InvalidInput, match=r"weight: expected \[5, 2\] with dtype and device of mean"):
        replace(some.carry, weight=torch.zeros(5, 3))
    with pytest.raises(InvalidInput, match=r"mean: expected fp32 \(or fp64\)"):
        ScanCarry(torch.zeros(5, 2, 8).half(), torch.zeros(5, 2).half())
    with pytest.raises(UnknownName, match="impl of scan"):
        scan(*some, impl="numba")


def test_nan_of_one_sequence_stays_in_it() -> None:
    stays("reference")


def stays(impl: str) -> None:
    some = case()
    bad = (some.seq == 0) | (some.seq < 0)
    x = some.x.masked_fill(bad[:, None, None], torch.nan)
    got, want = run(some._replace(x=x), impl), run(some, impl)
    rest = ~bad
    assert torch.equal(got[0][rest], want[0][rest]) and torch.equal(got[3][rest], want[3][rest])
    assert not got[0][some.seq < 0].any() and not got[3][some.seq < 0].any()
    for n in (1, 2, 4, 5):  # the carry and its gradients
        assert torch.equal(got[n][1:], want[n][1:])
