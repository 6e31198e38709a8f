"""Rotary embedding against complex numbers in Python's own floats."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.ops import RotaryFrequencies, angles, reposition, rotate, unrotate
from longreach.ops.rope import LAYOUTS
from longreach.testing.tolerance import unit_roundoff, within

U = 2.0**-24


def frequencies(rotary: int, base: float = 10000.0) -> Tensor:
    return base ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)


def turned(x: Tensor, pos: Tensor, inv_freq: Tensor, layout: str, scaling: float = 1.0) -> Tensor:
    """x [n, D] at positions [n], fp64: each pair is a complex number times scaling e^(i pos inv_freq)."""
    out = x.double().clone()
    pairs = len(inv_freq)
    for n, p in enumerate(pos.tolist()):
        for i, f in enumerate(inv_freq.tolist()):
            a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
            z = complex(float(x[n, a]), float(x[n, b])) * cmath.rect(scaling, p * f)
            out[n, a], out[n, b] = z.real, z.imag
    return out


def bound(x: Tensor, pairs: int, factor: float) -> Tensor:
    """cos and sin, two products and their sum are rounded: 3u (|a| + |b|) a turn; here |a| + |b| <= 2 max |x|."""
    return factor * 3 * U * 2 * x.abs().double().amax(-1, keepdim=True).expand_as(x) + 1e-30


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "rotary"), [(8, 8), (40, 40), (64, 32), (16, 2)])
@pytest.mark.parametrize("scaling", [1.0, 1.37])
def test_rotate_is_a_complex_product(layout: Any, dim: int, rotary: int, scaling: float) -> None:
    x, pos, inv_freq = torch.randn(5, dim), torch.tensor([0, 1, 77, 131_071, 1_000_000]), frequencies(rotary)
    cos, sin = angles(pos, inv_freq, scaling=scaling)
    got = rotate(x, cos, sin, layout=layout)
    assert cos.dtype == torch.float32 and cos.shape == (5, rotary // 2)
    within("x", got.double(), turned(x, pos, inv_freq, layout, scaling), bound(x, rotary // 2, scaling))
    assert torch.equal(got[:, rotary:], x[:, rotary:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rotate_keeps_the_dtype_and_rounds_once(dtype: torch.dtype) -> None:
    x, pos, inv_freq = torch.randn(6, 16).to(dtype), torch.arange(6) * 1000, frequencies(16)
    got = rotate(x, *angles(pos, inv_freq))
    assert got.dtype == dtype
    want = turned(x, pos, inv_freq, "half")
    within("x", got.double(), want, bound(x, 8, 1.0) + unit_roundoff(dtype) * (want.abs() + 1e-5))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.integers(0, 2**20), st.sampled_from(LAYOUTS), st.sampled_from((8, 16, 24)))
def test_reposition_is_rotating_at_the_new_place(old: int, new: int, layout: Any, rotary: int) -> None:
    x, inv_freq = torch.randn(3, 24), frequencies(rotary, 500_000.0)
    places = torch.tensor([old, new, 0]), torch.tensor([new, old, new])
    for scaling in (1.0, 0.8):
        before = rotate(x, *angles(places[0], inv_freq, scaling=scaling), layout=layout)
        got = reposition(before, *places, inv_freq, layout=layout)
        want = turned(x, places[1], inv_freq, layout, scaling)
        within("x", got.double(), want, bound(x, rotary // 2, 4.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", [1.0, 1.37, 0.5])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_unrotate_inverts_rotate(layout: Any, scaling: float, table: torch.dtype) -> None:
    """Whatever cos and sin are: with a bf16 table they are off the circle, and it comes back all the same."""
    x, pos = torch.randn(7, 24), torch.tensor([0, 3, 50, 999, 32_768, 131_071, 1_000_000])
    cos, sin = (t.to(table) for t in angles(pos, frequencies(16), scaling=scaling))
    back = unrotate(rotate(x, cos, sin, layout=layout), cos, sin, layout=layout)
    within("x", back.double(), x.double(), bound(x, 8, 4.0))
    assert torch.equal(back[:, 16:], x[:, 16:])


def test_leading_dimensions_broadcast() -> None:
    x = torch.randn(2, 3, 5, 16)
    cos, sin = angles(torch.arange(5), frequencies(16))
    whole = rotate(x, cos, sin)
    for b in range(2):
        for h in range(3):
            assert torch.equal(whole[b, h], rotate(x[b, h], cos, sin))
    per_batch = angles(torch.tensor([[[4]], [[9]]]).expand(2, 1, 5), frequencies(16))
    assert torch.equal(rotate(x, *per_batch)[1, 2, 3], rotate(x[1, 2, 3], *angles(torch.tensor(9), frequencies(16))))


def test_positions_keep_their_digits() -> None:
    """In fp32 alone, 1 000 003 times a frequency near 1 is off by up to 0.06."""
    pos, inv_freq = torch.tensor([1_000_003]), torch.tensor([0.9])
    cos, _ = angles(pos, inv_freq)
    want = torch.cos(torch.tensor(1_000_003 * float(inv_freq[0]), dtype=torch.float64))
    assert abs(float(cos[0, 0]) - float(want)) < 1e-7
    assert abs(float(torch.cos(pos * inv_freq)[0]) - float(want)) > 1e-4


def test_gradients() -> None:
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    pos, inv_freq = torch.tensor([3, 70]), frequencies(8)
    for layout in LAYOUTS:
        assert torch.autograd.gradcheck(lambda t, way=layout: rotate(t, *angles(pos, inv_freq), layout=way), x)
        assert torch.autograd.gradcheck(lambda t, way=layout: unrotate(t, *angles(pos, inv_freq), layout=way), x)


META = torch.device("meta")
X, C = torch.zeros(5, 16), torch.zeros(5, 8)


@pytest.mark.parametrize("op", [rotate, unrotate])
@pytest.mark.parametrize(
    ("x", "cos", "sin", "message"),
    [
        (X.int(), C, C, "x: expected a float tensor, got int32"),
        ([0.0], C, C, "x: .* got list"),
        (X, C.int(), C, "cos: expected a float tensor"),
        (X, C, 0.0, "sin: .* got float"),
        (X, C, C[:, :4], "expected equal shapes, got float32\\[5, 8\\].* and float32\\[5, 4\\]"),
        (X, C.to(META), C.to(META), "cos, sin: expected on cpu like x"),
        (X, C, C.to(META), "cos, sin: expected on cpu like x"),
        (X[:, :8], C, C, "8 pairs need a head dim of at least 16"),
        (X[:3], C, C, "float32\\[5, 8\\].* does not broadcast .* float32\\[3, 16\\]"),
        (X, C[None], C[None], "does not broadcast"),
        (X[:1], C, C, "does not broadcast"),
    ],
)
def test_what_does_not_fit_is_refused(op: Any, x: Any, cos: Any, sin: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        op(x, cos, sin)


@pytest.mark.parametrize("op", [rotate, unrotate])
def test_unknown_layouts_are_refused(op: Any) -> None:
    with pytest.raises(InvalidInput, match="'half' or 'interleaved', got 'neox'"):
        op(X, C, C, layout="neox")


@pytest.mark.parametrize(
    ("pos", "inv_freq", "message"),
    [
        (torch.arange(3), torch.zeros(2, 2), "inv_freq: expected float \\[rotary/2\\], got float32\\[2, 2\\]"),
        (torch.arange(3), torch.arange(3), "inv_freq: .* got int64"),
        (torch.arange(3), 1.0, "inv_freq: .* got float"),
        ([0, 1], torch.zeros(2), "pos: expected a tensor of positions, got list"),
        (torch.arange(3, device=META), torch.zeros(2), "pos: expected on cpu like inv_freq"),
    ],
)
def test_angles_refuse(pos: Any, inv_freq: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        angles(pos, inv_freq)


def test_reposition_refuses_what_does_not_fit() -> None:
    inv_freq = frequencies(16)
    with pytest.raises(InvalidInput, match="old, new: expected tensors of positions, got int and int"):
        reposition(X, 3, 4, inv_freq)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="does not broadcast"):
        reposition(X, torch.arange(4), torch.arange(4), inv_freq)
    with pytest.raises(InvalidInput, match=r"old, new: expected on one device, .*cpu.*meta"):
        reposition(X, torch.arange(5), torch.arange(5, device=META), inv_freq)
    with pytest.raises(InvalidInput, match="16 pairs need"):
        reposition(X, torch.arange(5), torch.arange(5), frequencies(32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_frequencies_turn_by_any_position(layout: Any, dtype: torch.dtype) -> None:
    x, by = torch.randn(5, 24).to(dtype), torch.tensor([0.0, 31.5, -7.0, 131_071.5, -0.5], dtype=torch.float64)
    got = RotaryFrequencies(frequencies(16), layout).turn(x, by)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    error = 1e-9 if dtype == torch.float64 else bound(x, 8, 1.0)
    within("x", got.double(), turned(x, by, frequencies(16), layout), error * torch.ones(5, 24))


def test_frequencies_that_do_not_fit() -> None:
    x, by = torch.randn(2, 8), torch.tensor([1, 2])
    nothing: Any = None
    for make, message in (
        (
            lambda: RotaryFrequencies(frequencies(8), "half").turn(nothing, by),
            "x: expected a float tensor, got NoneType",
        ),
        (lambda: RotaryFrequencies(frequencies(8)[None]).turn(x, by), r"inv_freq: expected float \[rotary/2\], got"),
        (lambda: RotaryFrequencies(frequencies(16)).turn(x, by), "cos: 8 pairs need a head dim of at least 16"),
        (
            lambda: RotaryFrequencies(frequencies(8)).turn(x, nothing),
            "by: expected a tensor of positions, got NoneType",
        ),
    ):
        with pytest.raises(InvalidInput, match=message):
            make()
