"""Codes and directions."""

from __future__ import annotations

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.ops.simhash import codes, projections
from tests.ops.simhash.brute import code_of
from tests.ops.simhash.cases import IMPLS

NAN, INF = float("nan"), float("inf")


def test_a_seed_gives_these_directions() -> None:
    """Plans name seeds: another stream would be another method."""
    drawn = projections(3, 2, 2, 7)
    assert drawn.dtype == torch.bfloat16 and drawn.shape == (2, 2, 3)
    assert drawn.flatten().tolist() == [
        1.6875, -0.466796875, 0.03271484375, 0.408203125, -0.7890625, 0.0020599365234375,
        -0.000888824462890625, -1.7578125, 1.015625, 0.6015625, -0.625, -0.171875,
    ]  # fmt: skip
    assert torch.equal(projections(3, 2, 2, 7), drawn)
    assert not torch.equal(projections(3, 2, 2, 8), drawn)


def test_directions_are_normal() -> None:
    drawn = projections(64, 16, 100, 0).double()
    assert abs(float(drawn.mean())) < 0.01 and abs(float(drawn.std()) - 1) < 0.01
    assert abs(float((drawn**4).mean()) - 3) < 0.1


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [1, 5, 16])
def test_codes_are_signs(impl: str, dtype: torch.dtype, bits: int) -> None:
    """Bit by bit, but for projections within rounding of zero, which the draw does not hold."""
    draw = torch.Generator().manual_seed(bits)
    x, centre = torch.randn(4, 3, 8, generator=draw).to(dtype), torch.randn(3, 8, generator=draw)
    drawn = projections(8, bits, 5, 1)
    found = codes(x, drawn, centre=centre, impl=impl)
    assert found.dtype == torch.uint16 and found.shape == (4, 3, 5)
    wanted = [
        [code_of(v, table) for table in drawn.double().tolist()] for v in (x.double() - centre).flatten(0, 1).tolist()
    ]
    assert found.flatten(0, 1).tolist() == wanted
    assert torch.equal(codes(x - 0, drawn, impl=impl), codes(x, drawn, centre=torch.zeros(8), impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_many_vectors(impl: str) -> None:
    """More than are hashed at a time."""
    x, drawn = torch.randn(2500, 8, generator=torch.Generator().manual_seed(1)), projections(8, 6, 4, 0)
    projected = x.double() @ drawn.double().flatten(0, 1).T
    wanted = ((projected.unflatten(1, (4, 6)) > 0) * 2 ** torch.arange(6)).sum(-1)
    assert projected.abs().min() > 1e-6
    assert torch.equal(codes(x, drawn, impl=impl).long(), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_void_vectors_have_code_zero(impl: str) -> None:
    """Zeros, the centre itself, NaN, infinities and what overflows; vectors beside them keep their codes."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    x[1], x[2, 5], x[3, 0], x[4, 1], x[5], x[6] = 0.0, NAN, INF, -INF, 3e38, 1e-30
    drawn = projections(8, 4, 30, 2)
    found = codes(x, drawn, impl=impl)
    assert (found[1:7].long() == 0).all()
    assert torch.equal(found[[0, 7]], codes(x[[0, 7]], drawn, impl=impl)) and (found[[0, 7]].long() > 0).any()
    assert (codes(x, drawn, centre=x.nan_to_num(), impl=impl).long()[[0, 1, 5, 7]] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_no_vectors(impl: str) -> None:
    assert codes(torch.zeros(0, 3, 8), projections(8, 4, 5, 0), impl=impl).shape == (0, 3, 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 0}, r"bits: expected an int in \[1, 16\], got 0"),
        ({"bits": 17}, r"bits: .* got 17"),
        ({"bits": 4.0}, r"bits: .* got 4.0"),
        ({"tables": 0}, r"tables: expected an int in \[1, 1024\], got 0"),
        ({"dim": 0}, "dim: expected an int >= 1, got 0"),
        ({"seed": -1}, r"seed: expected an int in \[0, 2\^32\), got -1"),
        ({"seed": 1 << 32}, "seed: .* got 4294967296"),
        ({"seed": None}, "seed: .* got None"),
    ],
)
def test_wrong_directions_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        projections(**({"dim": 8, "bits": 4, "tables": 5, "seed": 0} | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int32)}, r"x: expected float \[..., D\], got int32\[3, 8\]"),
        ({"x": None}, "x: .* got NoneType"),
        (
            {"x": torch.zeros(3, 16)},
            r"projections: expected bf16 \[tables, bits, D=16\] on cpu, got bfloat16\[5, 4, 8\]",
        ),
        ({"projections": torch.zeros(5, 4, 8)}, r"projections: .* got float32\[5, 4, 8\]"),
        ({"projections": torch.zeros(5, 17, 8, dtype=torch.bfloat16)}, "bits: .* got 17"),
        ({"projections": torch.zeros(5, 0, 8, dtype=torch.bfloat16)}, "bits: .* got 0"),
        ({"projections": torch.zeros(5, 4, 8, dtype=torch.bfloat16, device="meta")}, "projections: .* on meta"),
        ({"centre": torch.zeros(7)}, r"centre: expected float that broadcasts to float32\[3, 8\] on cpu, got"),
        ({"centre": torch.zeros(1, 3, 8)}, r"centre: .* got float32\[1, 3, 8\]"),
        ({"centre": torch.zeros(8, dtype=torch.int32)}, r"centre: .* got int32\[8\]"),
    ],
)
def test_wrong_vectors_are_refused(wrong: dict[str, object], message: str) -> None:
    given: dict = {"x": torch.zeros(3, 8), "projections": projections(8, 4, 5, 0)} | wrong  # type: ignore[type-arg]
    with pytest.raises(InvalidInput, match=message):
        codes(given.pop("x"), given.pop("projections"), **given)
