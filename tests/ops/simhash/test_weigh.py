"""Log-weights of sampled keys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, SelectionError
from longreach.ops import KVView, Rows, Spans, attend
from longreach.ops.simhash import Collisions, Weights, collide, weigh
from longreach.testing.inputs import poison
from tests.ops.simhash.brute import probability
from tests.ops.simhash.cases import IMPLS, Case, hashed


def cosine(q: Tensor, k: Tensor) -> float:
    """Of two vectors in fp64; void ones have 1 with each other and 0 with others."""
    a, b = (float(x.float().square().sum()) for x in (q, k))
    void = [not 0 < size < math.inf for size in (a, b)]
    if any(void):
        return 1.0 if all(void) else 0.0
    return min(1.0, max(-1.0, float((q.double() @ k.double()) / (q.double().norm() * k.double().norm()))))


def held_to(weights: Weights, found: Collisions, case: Case, floor: float = 0.0) -> int:
    """Every weight and factor in use, by the definition; how many there were."""
    assert all(x.shape == found.index.shape and x.dtype == torch.float32 for x in weights)
    group, checked = case.rows.q.shape[1] // 2, 0
    each = group if found.per == "kv" else 1
    for r, b in enumerate(case.rows.seq.tolist()):
        for li in range(found.index.shape[1]):
            n = int(found.count[r, li])
            for i in range(n if n <= found.index.shape[2] else 0):
                g, slot = li * each // group, found.index[r, li, i]
                page, offset = case.kv.locate(torch.tensor(b), slot.long())
                k = case.kv.k[page, g, offset].double() - case.centre[b, g]
                u, square = 0.0, 0.0
                for h in range(li * each, (li + 1) * each):
                    p = math.acos(-cosine(case.rows.q[r, h], k)) / math.pi
                    one = max(float(probability(p, case.tables.bits, case.tables.tables, found.least)), floor)
                    u, square = u + one, square + one**2
                wanted = math.log(int(found.met[r, li, i]) / u)
                assert abs(float(weights.log_weight[r, li, i]) - wanted) < 1e-4, (r, li, i)
                assert abs(float(weights.factor[r, li, i]) - (1 - square / u)) < 2e-5, (r, li, i)
                checked += 1
    return checked


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.covering
def test_weights(impl: str, share: Any, group: int, page: int | None, dtype: torch.dtype) -> None:
    case = hashed([60, 33], group=group, page=page, dtype=dtype)
    found = collide(case.rows, case.tables, case.queries, share=share, capacity=60)
    for floor in (0.0, 0.2):
        weights = weigh(case.rows, case.kv, case.tables, found, case.centre, floor=floor, impl=impl)
        assert held_to(weights, found, case, floor) > 20


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("least", [1, 3])
def test_other_rules(impl: str, least: int) -> None:
    case = hashed([150], number=12)
    found = collide(case.rows, case.tables, case.queries, least=least, capacity=150)
    weights = weigh(case.rows, case.kv, case.tables, found, case.centre, impl=impl)
    assert held_to(weights, found, case) > 20


def ends(impl: str, share: Any) -> Weights:
    """Weights of keys equal to the queries, opposite to them, zero, NaN and infinite. Two of the queries are void."""
    case = hashed([12], count=3)
    q = torch.randn(1, 1, 16).expand(3, 4, 16).clone()
    q[1], q[2, :, 3] = 0.0, math.nan
    k = torch.randn(1, 2, 12, 16)
    for i, key in enumerate((q[0, 0], -q[0, 0], 3 * q[0, 0], torch.zeros(16), q[2, 0], torch.full((16,), math.inf))):
        k[0, :, i] = key
    case.centre.zero_()
    rows, kv = Rows(q, torch.zeros(3, dtype=torch.int64), torch.full((3,), 11)), KVView(k, k, torch.tensor([12]))
    heads = 2 if share == "group" else 4
    index = torch.arange(12, dtype=torch.int32).expand(3, heads, 12).contiguous()
    count, met = torch.full((3, heads), 12, dtype=torch.int32), torch.ones(3, heads, 12, dtype=torch.uint8)
    per: Any = "kv" if share == "group" else "query"
    found = Collisions(index, count, per, met, count, 2)
    return weigh(rows, kv, case.tables, found, case.centre, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_ends(impl: str) -> None:
    """A key equal to the query has weight 1. Void vectors have finite weights, and change no other."""
    weights, factor = ends(impl, "own")
    assert factor.isfinite().all() and factor.min() >= 0 and factor.max() <= 1
    assert factor[0, :, 0].abs().max() < 1e-6 and torch.equal(factor[1:, :, 3:6], torch.zeros(2, 4, 3))
    assert weights.isfinite().all()
    assert weights[0, :, 0].abs().max() < 1e-6 and weights[0, :, 2].abs().max() < 1e-6
    assert torch.equal(weights[1:, :, 3:6], torch.zeros(2, 4, 3))  # void beside void: always sampled
    half = -math.log(float(probability(0.5, 4, 9, 2)))
    assert (weights[0, :, 3:6] - half).abs().max() < 1e-5 and (weights[1:, :, :3] - half).abs().max() < 1e-5
    assert (weights[0, :, 1] > 20).all()  # opposite, and never sampled but in rounding
    together, factor = ends(impl, "group")
    assert factor.isfinite().all() and factor.min() >= 0 and factor.max() <= 1
    assert together.isfinite().all() and torch.equal(together[1:, :, 3:6], torch.full((2, 2, 3), -math.log(2)).float())


@pytest.mark.parametrize("impl", IMPLS)
def test_only_named_keys_are_read(impl: str) -> None:
    """Lists that overflow name no keys; entries past the count may be anything."""
    case = hashed([60], number=20, bits=3, group=4)
    found = collide(case.rows, case.tables, case.queries, share="own", capacity=60, impl="reference")
    room = int(found.count.median())
    found = collide(case.rows, case.tables, case.queries, share="own", capacity=room, impl="reference")
    fits = found.count <= room
    assert fits.any() and not fits.all()
    spare = torch.arange(room) >= torch.where(fits, found.count, 0)[..., None]
    found = replace(found, index=found.index.masked_fill(spare, 10**9))
    wanted = weigh(case.rows, case.kv, case.tables, found, case.centre, impl=impl)
    for g in range(2):
        heads = slice(4 * g, 4 * g + 4)
        named = set(found.index[:, heads][~spare[:, heads]].tolist())
        poison(case.kv, 0, g, set(range(60)) - named)
    weights = weigh(case.rows, case.kv, case.tables, found, case.centre, impl=impl)
    for got, want in zip(weights, wanted, strict=True):
        assert torch.equal(got[~spare], want[~spare]) and got[~spare].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entry", [-1, 60, 10**9])
def test_other_slots_are_refused(impl: str, entry: int) -> None:
    case = hashed([60])
    found = collide(case.rows, case.tables, case.queries, capacity=60)
    found.index[1, 1, 0] = entry
    assert found.count[1, 1] > 0
    with pytest.raises(SelectionError, match="60"):
        weigh(case.rows, case.kv, case.tables, found, case.centre, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_everything_sampled_is_dense(impl: str) -> None:
    """A table of one bit each and least = 1: nearly all keys are met, with weights near 1, and attention takes them."""
    case = hashed([60], bits=1, number=64, first=0)
    found = collide(case.rows, case.tables, case.queries, least=1, capacity=60, impl=impl)
    weights, factor = weigh(case.rows, case.kv, case.tables, found, case.centre, impl=impl)
    assert factor.min() >= 0 and factor.max() < 0.02
    assert (found.count == 60).all() and weights.min() > math.log(2 / 2) - 1e-6 and weights.max() < 0.01
    lists = found.lists(weights)
    rows = Rows(case.rows.q, case.rows.seq, torch.full((3,), 59))
    got, dense = (attend(rows, case.kv, selection, scale=0.25) for selection in (lists, Spans.dense()))
    torch.testing.assert_close(got.out, dense.out, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"found": None}, "found: expected Collisions, got NoneType"),
        ({"tables": None}, "tables: expected HashTables, got NoneType"),
        ({"centre": torch.zeros(1, 2, 8)}, r"centre: expected float \[B, G, D\] = \[1, 2, 16\] on cpu, got float32"),
        ({"centre": torch.zeros(1, 2, 16, dtype=torch.int32)}, "centre: .* got int32"),
        ({"centre": torch.zeros(1, 2, 16, device="meta")}, "centre: .* on meta"),
        ({"floor": -0.1}, r"floor: expected a number in \[0, 1\), got -0.1"),
        ({"floor": 1.0}, "floor: .* got 1.0"),
        ({"floor": math.nan}, "floor: .* got nan"),
        ({"rows": None}, "rows: expected Rows"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    case = hashed([30])
    found = collide(case.rows, case.tables, case.queries, capacity=8)
    given = {"rows": case.rows, "kv": case.kv, "tables": case.tables, "found": found, "centre": case.centre} | wrong
    with pytest.raises(InvalidInput, match=message):
        weigh(**given)
    for name, part in (("index", found.index.long()), ("met", found.met.int()), ("count", found.count[:1])):
        with pytest.raises(InvalidInput, match=f"found.{name}: expected"):
            weigh(case.rows, case.kv, case.tables, replace(found, **{name: part}), case.centre)  # type: ignore[arg-type]


def test_an_evicted_view_is_refused() -> None:
    case = hashed([30])
    found = collide(case.rows, case.tables, case.queries, capacity=8)
    kv = KVView(case.kv.k, case.kv.v, case.kv.seq_lens, slot_pos=torch.zeros(case.kv.k.shape[:3], dtype=torch.int64))
    with pytest.raises(InvalidInput, match="kv: expected slots in the order of positions, got slot_pos"):
        weigh(case.rows, kv, case.tables, found, case.centre)
