"""u, against whole fractions, and against the keys that are sampled."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from longreach.errors import InvalidInput
from longreach.ops import KVView, Rows
from longreach.ops.simhash import HashTables, build, codes, collide, inclusion, projections, weigh
from longreach.ops.simhash.probability import MOST_LEAST, MOST_TABLES, form
from tests.ops.simhash.brute import probability
from tests.ops.simhash.cases import IMPLS

PRESETS = [(8, 75, 2), (9, 120, 2), (10, 75, 2), (10, 150, 2), (10, 220, 2), (11, 300, 2)]
OTHERS = [(10, 100, 1), (4, 20, 2), (8, 40, 3), (6, 75, 8), (3, 16, 16), (2, 64, 16), (1, 2, 2), (16, 40, 5)]
MANY = [
    (8, 1024, 16), (4, 700, 16), (8, 900, 16), (8, 700, 12), (5, 1024, 12), (2, 1024, 15), (10, 1024, 2),
    (10, 1024, 1),
]  # fmt: skip
PLACES = torch.cat([torch.linspace(0.02, 1, 60), torch.tensor([1 - 1e-3, 1 - 1e-5, 1 - 2**-24])])


def compiled(p: torch.Tensor, bits: int, tables: int, least: int) -> torch.Tensor:
    """What the Numba kernel computes."""
    pytest.importorskip("numba")
    import numpy as np

    from longreach.ops.simhash import numba
    from longreach.ops.simhash.numba_kernels import total_inclusion

    total = np.zeros(len(p), np.float32)
    total_inclusion(p.numpy().copy(), numba.law(bits, tables, least, 0.0), total)
    return torch.from_numpy(total)


@pytest.mark.parametrize(("bits", "tables", "least"), PRESETS + OTHERS)
def test_u_keeps_its_digits(bits: int, tables: int, least: int) -> None:
    """In fp32 to 1e-5, in fp64 to 1e-11, wherever u is a normal number."""
    p = PLACES.float()
    exact = [probability(x, bits, tables, least) for x in p.tolist()]
    wide = inclusion(p.double(), bits, tables, least).tolist()
    assert max(abs(float(a / b) - 1) for a, b in zip(map(Fraction, wide), exact, strict=True) if b > 1e-300) < 1e-11
    for u in (inclusion(p, bits, tables, least), compiled(p, bits, tables, least)):
        assert u.dtype == torch.float32 and (u <= 1).all()
        errors = [abs(float(Fraction(a) / b) - 1) for a, b in zip(u.tolist(), exact, strict=True) if b > 1e-37]
        assert max(errors) < 1e-5


@pytest.mark.parametrize(("bits", "tables", "least"), MANY)
def test_u_of_many_tables(bits: int, tables: int, least: int) -> None:
    """With up to 1024 tables and `least` up to 16, where coefficients of the series exceed the range of fp32."""
    wide = inclusion(PLACES.double(), bits, tables, least)
    assert wide.isfinite().all()
    for n in range(3, len(PLACES), 10):
        exact = probability(PLACES[n].item(), bits, tables, least)
        assert exact < 1e-300 or abs(float(Fraction(wide[n].item()) / exact) - 1) < 1e-11
    normal = wide > 1e-37
    assert normal.any() and (wide[normal] < 0.1).any()
    for u in (inclusion(PLACES.float(), bits, tables, least), compiled(PLACES.float(), bits, tables, least)):
        assert u.dtype == torch.float32 and u.isfinite().all() and (u <= 1).all()
        torch.testing.assert_close(u[normal].double(), wide[normal], rtol=1e-5, atol=0)


@pytest.mark.parametrize("least", [2, 9, 13, MOST_LEAST])
def test_constants_of_single_precision_are_in_its_range(least: int) -> None:
    for tables in (700, MOST_TABLES):
        f = form(tables, least)
        assert max(*f.coefficients[: f.single], *f.binomials, f.scale**least) < 1e38


@pytest.mark.parametrize(("bits", "tables", "least"), PRESETS + OTHERS + MANY)
def test_ends(bits: int, tables: int, least: int) -> None:
    assert inclusion(torch.tensor([0.0, 1.0]), bits, tables, least).tolist() == [0.0, 1.0]
    assert compiled(torch.tensor([0.0, 1.0]), bits, tables, least).tolist() == [2.0**-126, 1.0]  # never log 0


def test_u_ascends() -> None:
    p = torch.linspace(0, 1, 100_001)
    for u in (inclusion(p, 10, 150), compiled(p, 10, 150, 2)):
        assert ((u.diff() / u[1:].clamp(min=1e-30)) > -1e-6).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 0}, r"bits: expected an int in \[1, 16\], got 0"),
        ({"bits": 17}, "bits: .* got 17"),
        ({"tables": 1}, "tables: expected at least 2, as a key must collide in least=2 of them, got 1; .* or least=1"),
        ({"tables": 1025}, "tables: .* got 1025"),
        ({"least": 0}, r"least: expected an int in \[1, 16\], got 0"),
        ({"least": 17}, "least: .* got 17"),
        ({"least": True}, "least: .* got True"),
        ({"p": torch.tensor([1])}, r"p: expected fp32 or fp64, got int64\[1\]"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, object], message: str) -> None:
    given: dict = {"p": torch.ones(2), "bits": 8, "tables": 75, "least": 2} | wrong  # type: ignore[type-arg]
    with pytest.raises(InvalidInput, match=message):
        inclusion(**given)


DECADES = (1e-3, 1e-2, 1e-1, 1.0)
SEEDS = 2000


@pytest.mark.parametrize("impl", [pytest.param("reference", marks=pytest.mark.sweep), *IMPLS[1:]])
@pytest.mark.parametrize("least", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_keys_are_sampled_as_often_as_u_says(impl: str, least: int) -> None:
    """Over seeds, sampled keys over u, and the sum of weights of all keys, own and group, within 3 standard errors.

    By decade of u. Keys of one draw correlate, so errors are those of a decade's sums over draws.
    """
    dim, keys, heads, bits, number = 16, 48, 3, 4, 24
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, dim, generator=draw) + 0.4 * torch.randn(1, heads, dim, generator=draw)
    share = torch.linspace(-0.8, 0.95, keys)[:, None]
    k = share * q[0, 0] / q[0, 0].norm() * 4 + (1 - share.abs()) * torch.randn(keys, dim, generator=draw)
    k[0], k[1, 3] = 0.0, math.nan  # void ones are sampled without bias too
    centre = torch.randn(1, 1, dim, generator=draw)
    kv = KVView((k + centre[0])[None, None], k[None, None], torch.tensor([keys]))
    kv.k[0, 0, 0] = centre[0, 0]
    rows = Rows(q, torch.tensor([0]), torch.tensor([keys - 1]))
    k[1] = 0.0
    unit_q, unit_k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q[0], k))
    cosine = unit_q @ unit_k.T
    p = 1 - torch.acos(cosine.clamp(-1, 1)) / math.pi
    u = torch.tensor([[float(probability(x, bits, number, least)) for x in head] for head in p.tolist()])
    hits, own, together = (torch.zeros(SEEDS, *shape) for shape in ((heads, keys), (heads, keys), (keys,)))
    one = torch.tensor([0])
    for seed in range(SEEDS):
        drawn = projections(dim, bits, number, seed)
        tables = HashTables.empty(1, 1, keys, bits=bits, tables=number, size=64)
        build(tables, codes(kv.k.transpose(1, 2), drawn, centre=centre[:, None], impl=impl), one, one + keys, impl=impl)
        query = codes(q, drawn, impl=impl)
        for sharing, weights in (("own", own), ("group", together)):
            found = collide(rows, tables, query, least=least, share=sharing, capacity=keys, impl=impl)  # type: ignore[arg-type]
            weight = weigh(rows, kv, tables, found, centre, impl=impl).log_weight.exp()
            for li, n in enumerate(found.count[0].tolist()):
                index = found.index[0, li, :n].long()
                (weights[seed] if sharing == "group" else weights[seed, li])[index] = weight[0, li, :n]
                if sharing == "own":
                    hits[seed, li, index] = 1.0
    assert (u > 1e-3).any() and (u > 0.5).any()
    for low, high in pairwise(DECADES):
        of = (u >= low) & (u < high)
        within(hits[:, of], u[of])
        within(own[:, of], torch.ones_like(u[of]))
        of = (u.amax(0) >= low) & (u.amax(0) < high)
        within(together[:, of], torch.ones_like(u[0, of]))


def within(drawn: torch.Tensor, expected: torch.Tensor) -> None:
    """The mean over draws of a sum over keys is within 3 standard errors of the expected sum."""
    assert drawn.shape[1] >= 1
    sums = drawn.double().sum(1)
    error = float(sums.std()) / len(sums) ** 0.5
    assert abs(float(sums.mean()) - float(expected.double().sum())) < 3 * error
