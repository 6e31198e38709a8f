"""Codes of blocks and rows, beside keys rotated by complex numbers in Python's own floats."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops import BlockCode, RotaryFrequencies
from longreach.ops.recall import codes, planes_of
from longreach.ops.rope import LAYOUTS
from tests.ops.test_rope import frequencies, turned

BLOCK, DIM = 4, 16
WRONG: Any = "mean"
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def known(layout: Any = "half", rotary: int = DIM) -> RotaryFrequencies:
    return RotaryFrequencies(frequencies(rotary), layout)


def rotated(x: Tensor, pos: Tensor, by: RotaryFrequencies) -> Tensor:
    """fp64 x [..., n, D] rotated for positions [n]."""
    rows = x.reshape(-1, x.shape[-1])
    return turned(rows, pos.repeat(len(rows) // len(pos)), by.inv_freq, by.layout).view(x.shape)


@layouts
@pytest.mark.parametrize("block", [1, 4, 5])
@pytest.mark.parametrize("rotary", [DIM, 8])
def test_a_summary_is_the_mean_key_in_the_middle(layout: Any, block: int, rotary: int) -> None:
    by, plain = known(layout, rotary), torch.randn(2, 3, block, DIM, dtype=torch.float64)
    first = torch.tensor([[0, 7, 1000], [64, 5, 131_072]])
    k = torch.stack([
        torch.stack([rotated(plain[a, b], first[a, b] + torch.arange(block), by) for b in range(3)]) for a in range(2)
    ])  # fmt: skip
    code = BlockCode("summary", by)
    got = code.of_blocks(k, first)
    for a in range(2):
        for b in range(3):
            middle = first[a, b].double() + (block - 1) / 2
            want = rotated(plain[a, b].mean(0, keepdim=True), middle[None], by)[0]
            torch.testing.assert_close(got[a, b], want, rtol=0, atol=1e-9)
    q = torch.randn(2, 4, DIM)
    assert code.of_rows(q, torch.tensor([1, 2])) is q
    assert code.pool == "softmax" and code.width(DIM) == DIM


def test_gradients_of_summaries() -> None:
    code, k = BlockCode("summary", known()), torch.randn(2, BLOCK, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: code.of_blocks(x, torch.tensor([0, 40])), (k,))


def test_bounds_are_an_upper_bound() -> None:
    code = BlockCode("bounds")
    k, q = torch.randn(5, BLOCK, DIM), torch.randn(3, 2, DIM)
    blocks, rows = code.of_blocks(k, torch.arange(5)), code.of_rows(q, torch.arange(3))
    assert blocks.shape == (5, 2 * DIM) and rows.shape == (3, 2, 2 * DIM) and code.width(DIM) == 2 * DIM
    assert code.pool == "sum"
    for r in range(3):
        for h in range(2):
            for b in range(5):
                want = sum(max(float(q[r, h, d] * k[b, i, d]) for i in range(BLOCK)) for d in range(DIM))
                torch.testing.assert_close(float(rows[r, h] @ blocks[b]), want, rtol=1e-5, atol=1e-5)


@layouts
def test_hashes_are_signs_before_rotation(layout: Any) -> None:
    by, planes = known(layout), planes_of(DIM, 24, 3)
    code = BlockCode("hash", by, planes)
    plain, q = torch.randn(2, BLOCK, DIM, dtype=torch.float64), torch.randn(3, 2, DIM, dtype=torch.float64)
    first, pos = torch.tensor([8, 400]), torch.tensor([0, 9, 5000])
    k = torch.stack([rotated(plain[b], first[b] + torch.arange(BLOCK), by) for b in range(2)])
    blocks, rows = (
        code.of_blocks(k, first),
        code.of_rows(torch.stack([rotated(q[:, h], pos, by) for h in (0, 1)], 1), pos),
    )
    assert code.width(DIM) == 24 and code.pool == "sum"
    for x, got in ((plain.mean(1), blocks), (q, rows)):
        assert torch.equal(got, torch.where(x @ planes.double() >= 0, 1.0, -1.0).double())


def test_the_sign_of_zero_is_positive() -> None:
    code = BlockCode("hash", known(), planes_of(DIM, 8, 0))
    assert bool((code.of_blocks(torch.zeros(1, BLOCK, DIM), torch.zeros(1).long()) == 1).all())
    assert bool((code.of_rows(torch.zeros(1, 1, DIM), torch.zeros(1).long()) == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["summary", "bounds", "hash"])
def test_codes_keep_the_dtype(kind: Any, dtype: torch.dtype) -> None:
    code = BlockCode(kind, known(), planes_of(DIM, 8, 0))
    blocks = code.of_blocks(torch.randn(3, 2, BLOCK, DIM).to(dtype), torch.zeros(3, 2).long())
    rows = code.of_rows(torch.randn(5, 4, DIM).to(dtype), torch.arange(5))
    assert blocks.dtype == rows.dtype == dtype and blocks.shape[-1] == rows.shape[-1] == code.width(DIM)


def test_rows_computed_together_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code, q, pos = BlockCode("hash", known(), planes_of(DIM, 64, 1)), torch.randn(9, 4, DIM), torch.arange(9) * 77
    want = code.of_rows(q, pos)
    monkeypatch.setattr(codes, "AT_ONCE", 300)
    assert torch.equal(code.of_rows(q, pos), want)


def test_planes_are_the_same_everywhere() -> None:
    planes = planes_of(128, 128, 7)
    assert planes.dtype == torch.bfloat16 and planes.shape == (128, 128)
    found = hashlib.sha256(planes.view(torch.int16).numpy().tobytes()).hexdigest()
    assert found[:16] == "6e5abc6b405124cd"
    assert not torch.equal(planes, planes_of(128, 128, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockCode(WRONG), "kind: expected one of summary, bounds, hash, got 'mean'"),
        (lambda: BlockCode("summary"), "frequencies: expected RotaryFrequencies, got NoneType"),
        (lambda: BlockCode("hash", known()), r"planes: expected float \[D, bits\], got NoneType"),
        (lambda: BlockCode("hash", known(), torch.ones(DIM, 12)), "bits: expected a multiple of 8 up to 256, got 12"),
        (lambda: BlockCode("hash", known(), torch.ones(8, 8)).width(DIM), r"planes: expected \[D=16, bits\]"),
        (lambda: BlockCode("bounds").width(136), "head dim: codes 'bounds' take up to 128, got 136"),
        (lambda: BlockCode("bounds").of_blocks(torch.ones(8), torch.tensor(0)), "k: expected float"),
        (lambda: BlockCode("bounds").of_blocks(torch.ones(2, 8, 8), torch.tensor(0)), r"first: expected int \[2\]"),
        (lambda: BlockCode("bounds").of_blocks(torch.ones(8, 8), torch.tensor(0.5)), r"first: expected int \[\]"),
        (lambda: BlockCode("bounds").of_rows(torch.ones(8, 8), torch.tensor(0)), r"q: expected float \[R, H, D\]"),
        (lambda: BlockCode("bounds").of_rows(torch.ones(2, 1, 8), torch.tensor([0])), r"pos: expected int \[R=2\]"),
        (lambda: planes_of(8, 260, 0), "bits: expected a multiple of 8 up to 256, got 260"),
        (lambda: planes_of(8, True, 0), "bits: expected a multiple of 8"),
        (lambda: planes_of(0, 8, 0), "dim: expected an int >= 1, got 0"),
        (lambda: planes_of(8, 8, -1), r"seed: expected an int in \[0, 2\^32\), got -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()
