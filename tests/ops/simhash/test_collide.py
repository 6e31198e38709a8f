"""Keys that collide, against comparing all codes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.ops import Rows
from longreach.ops.simhash import Collisions, HashTables, build, codes, collide, projections
from tests.ops.simhash.brute import sampled
from tests.ops.simhash.cases import IMPLS, Case, hashed


def held_to(found: Collisions, case: Case, least: int = 2) -> None:
    """Every list is what comparing all codes gives, or reports its overflow; ids read are those of the buckets."""
    group, (rows, capacity) = case.rows.q.shape[1] // 2, found.index.shape[::2]
    assert found.index.dtype == found.count.dtype == found.looked_up.dtype == torch.int32
    for r in range(rows):
        b = int(case.rows.seq[r])
        first, stop = case.tables.first, int(case.tables.stop[b])
        each = group if found.per == "kv" else 1
        for li in range(case.rows.q.shape[1] // each):
            g, heads = li * each // group, range(li * each, (li + 1) * each)
            keys = case.keys[b, :stop, g]
            chosen = [sampled(case.queries[r, h], keys, first, least) for h in heads]
            wanted = sorted(set().union(*chosen))
            assert int(found.count[r, li]) == len(wanted)
            if len(wanted) <= capacity:
                assert found.index[r, li, : len(wanted)].tolist() == wanted
                met = [sum(n in one for one in chosen) for n in wanted]
                assert found.met[r, li, : len(wanted)].tolist() == met
            same = [(keys[first:].long() == case.queries[r, h].long()).sum() for h in heads]
            assert int(found.looked_up[r, li]) == int(sum(same))  # no more was ever looked at


@pytest.fixture(params=[1, 7])
def workers(request: pytest.FixtureRequest) -> Any:
    """With more threads than lists, a list's segments are looked up by several."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("seed", range(6))
def test_any_case(impl: str, share: Any, seed: int, workers: None) -> None:
    dice = random.Random(seed)
    case = hashed(
        [dice.choice((1, 3, 4, 40, 77)) for _ in range(dice.choice((1, 3)))], group=dice.choice((1, 2, 5, 16)),
        count=dice.choice((1, 3)), bits=dice.choice((1, 2, 4)), number=dice.choice((3, 9)),
        size=dice.choice((8, 16, 65536)), first=dice.choice((0, 3, 20)), seed=seed, impl=impl,
    )  # fmt: skip
    for least in (1, 2, 3):
        for capacity in (1, 8, 100):
            held_to(
                collide(case.rows, case.tables, case.queries, share=share, least=least, capacity=capacity, impl=impl),
                case,
                least,
            )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("number", [223, 224, 257, 300, 1024])
def test_a_key_in_every_table(impl: str, share: Any, number: int) -> None:
    """A query equal to a key meets it once, however many tables hold it: more than a byte counts."""
    drawn = projections(8, 6, number, 0)
    keys = torch.randn(1, 30, 1, 8, generator=torch.Generator().manual_seed(0))
    tables = HashTables.empty(1, 1, 30, bits=6, tables=number)
    build(tables, codes(keys, drawn), torch.tensor([0]), torch.tensor([30]), impl=impl)
    rows = Rows(keys[:, 7].expand(1, 4, 8).contiguous(), torch.tensor([0]), torch.tensor([29]))
    query = codes(rows.q, drawn)
    found = collide(rows, tables, query, share=share, least=16, capacity=30, impl=impl)
    assert 7 in found.index[0, 0, : found.count[0, 0]].tolist()
    met = found.met[0, 0, : found.count[0, 0]]
    assert (met == (4 if share == "group" else 1)).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("stop", [-1, 0, 3, 4, 17, 32, 50])
def test_truncated_keys_are_not_returned(impl: str, stop: int, workers: None) -> None:
    case = hashed([60], size=16, number=20, bits=2, impl=impl)
    case.tables.stop.fill_(stop)
    for share in ("own", "group"):
        found = collide(case.rows, case.tables, case.queries, share=share, capacity=60, impl=impl)  # type: ignore[arg-type]
        last = found.index.gather(2, (found.count[..., None].long() - 1).clamp(min=0))
        assert ((last[..., 0] < max(stop, 0)) | (found.count == 0)).all()
        for r in range(3):
            keys = case.keys[0, : max(stop, 0), 0]
            assert int(found.count[r, 0]) == len(
                set().union(*(sampled(case.queries[r, h], keys, 3, 2) for h in range(2 if share == "group" else 1)))
            )


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(impl: str) -> None:
    case = hashed([30], count=0)
    found = collide(case.rows, case.tables, case.queries, capacity=4, impl=impl)
    assert found.index.shape == (0, 2, 4) and found.count.shape == (0, 2)


def test_results_make_lists() -> None:
    """All visible, per KV head; a list that overflows says so."""
    case = hashed([60], number=20, bits=2)
    found = collide(case.rows, case.tables, case.queries, capacity=9)
    lists = found.lists()
    assert lists.per == "kv" and lists.all_visible
    assert torch.equal(lists.overflowed, found.count > 9) and lists.overflowed.any()
    own = collide(case.rows, case.tables, case.queries, capacity=9, share="own").lists()
    assert own.per == "query" and not own.all_visible


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": None}, "rows: expected Rows, got NoneType"),
        ({"tables": 3}, "tables: expected HashTables, got int"),
        (
            {"codes": torch.zeros(3, 4, 9, dtype=torch.int32)},
            r"codes: expected uint16 \[R, H, tables\] = \[3, 4, 9\], got",
        ),
        ({"codes": torch.zeros(3, 4, 8, dtype=torch.uint16)}, r"codes: .* got uint16\[3, 4, 8\]"),
        ({"codes": torch.full((3, 4, 9), 16, dtype=torch.uint16)}, r"codes: expected below 2\^bits = 16"),
        (
            {"codes": torch.zeros(3, 4, 9, dtype=torch.uint16, device="meta")},
            "codes: expected on cpu like the rows, got",
        ),
        ({"capacity": 0}, r"capacity: expected an int in \[1, 1073741824\), got 0"),
        ({"least": 0}, r"least: expected an int in \[1, 16\], got 0"),
        ({"least": 10}, "tables: expected at least 10, .* got 9"),
        ({"least": 2.0}, "least: .* got 2.0"),
        ({"share": "all"}, "share: expected 'own' or 'group', got 'all'"),
        (
            {"rows": Rows(torch.zeros(3, 4, 16), torch.tensor([0, 1, 2]), torch.tensor([5, 5, 5]))},
            r"rows\.seq: .*B=1\)",
        ),
        ({"tables": HashTables.empty(1, 3, 40, bits=4, tables=9)}, "heads: 4 query heads must be 1 to 16 times the 3"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    case = hashed([30])
    given = {"rows": case.rows, "tables": case.tables, "codes": case.queries, "capacity": 8} | wrong
    with pytest.raises(InvalidInput, match=message):
        collide(given.pop("rows"), given.pop("tables"), given.pop("codes"), **given)


def test_an_unknown_implementation_is_refused() -> None:
    case = hashed([30])
    with pytest.raises(
        UnknownName, match=r"unknown impl of simhash\.collide 'scan'; known: auto, reference, triton, numba"
    ):
        collide(case.rows, case.tables, case.queries, capacity=8, impl="scan")
