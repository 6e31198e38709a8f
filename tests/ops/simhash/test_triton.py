"""The Triton kernels give the reference's keys and weights: in Python on a CPU, for real on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import Unsupported
from longreach.ops.simhash import (
    Collisions,
    HashTables,
    Weights,
    build,
    codes,
    collide,
    projections,
    triton_attention,
    weigh,
)
from tests.ops.attend.kernels import HALF, PLACE, here, needs_gpu
from tests.ops.simhash.cases import Case, cut, hashed, scattered, tabled
from tests.ops.simhash.test_attend import SCALE, SINKS, drawn_for, last_rows, many_left, most, one_call, void_vectors
from tests.ops.simhash.test_tables import held_to, random_codes


def fresh(sequences: int, capacity: int, bits: int, size: int, first: int, tables: int = 5) -> HashTables:
    """Tables in memory that holds poison, as one layer of a larger tensor."""
    ids = torch.full((sequences, 2, 2, tables, capacity), 0x2BCD, dtype=torch.int16).view(torch.uint16)
    shape = (sequences, 2, 2, tables, -(-capacity // size), (1 << bits) + 1)
    poison = torch.full(shape, 0x2BCD, dtype=torch.int32 if size == 65536 else torch.int16)
    offsets = poison if size == 65536 else poison.view(torch.uint16)
    return HashTables(
        ids.to(PLACE)[:, 1], offsets.to(PLACE)[:, 1], torch.full((sequences,), first, dtype=torch.int32, device=PLACE),
        size, first,
    )  # fmt: skip


def back(tables: HashTables) -> HashTables:
    return HashTables(tables.ids.cpu(), tables.offsets.cpu(), tables.stop.cpu(), tables.size, tables.first)


def add(tables: HashTables, codes: Tensor, seq: Tensor, count: Tensor) -> None:
    build(tables, here(codes), here(seq), here(count), impl="triton")


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("bits", [1, 5, 16])
@pytest.mark.parametrize("dim", [8, 24])
def test_codes(dtype: torch.dtype, bits: int, dim: int) -> None:
    """Strided keys of several heads with a centre; queries; vectors without a direction."""
    draw = torch.Generator().manual_seed(bits)
    drawn = projections(dim, bits, 3, 1)
    x = torch.randn(2, 5, 3, dim + 4, generator=draw).to(dtype)[..., :dim].transpose(1, 2)
    x[0, 0, 1], x[1, 2, 3, 0], x[0, 1, 0, 1] = 0, torch.nan, torch.inf
    for centre in (None, torch.randn(2, 3, 1, dim, generator=draw), torch.randn(dim, generator=draw).to(dtype)):
        want = codes(x, drawn, centre=centre, impl="reference")
        got = codes(here(x), here(drawn), centre=None if centre is None else here(centre), impl="triton")
        assert torch.equal(got.cpu().long(), want.long())
    for some in (x[0, 0, 0], x[0, 0], x[:, :, None], x[:0]):
        assert torch.equal(
            codes(here(some), here(drawn), impl="triton").cpu().long(), codes(some, drawn, impl="reference").long()
        )


@pytest.mark.parametrize("size", [8, 32, 65536])
@pytest.mark.parametrize("first", [0, 5])
def test_keys_come_in_any_chunks(size: int, first: int) -> None:
    known = random_codes(3, 90, bits=3, tables=2)
    tables = fresh(3, 90, 3, size, first, tables=2)
    at, every = torch.full((3,), first), torch.arange(3)
    for steps in ([0, 0, 0], [1, 0, 30], [7, 2, 0], [40, 40, 40], [90 - first - 48, 1, 0]):
        count = torch.tensor(steps)
        add(tables, cut(known, at, count), every, count)
        at = at + count
        assert tables.stop.tolist() == at.tolist()
        held_to(back(tables), known)


@pytest.mark.parametrize("seed", range(6))
def test_truncated_tables_go_on(seed: int) -> None:
    """Cut anywhere, again and again; other keys follow. Sequences that are not named keep all bytes."""
    dice = random.Random(seed)
    bits, size, first = dice.choice((1, 2, 4)), dice.choice((8, 16, 65536)), dice.choice((0, 4, 20))
    tables, known = fresh(4, 80, bits, size, first, tables=2), random_codes(4, 80, bits, tables=2, seed=seed)
    others, at = known.view(torch.int16).clone(), torch.full((4,), first)
    untouched = [x[0].clone() for x in (tables.ids, tables.offsets)]
    for turn in range(5):
        slots = torch.tensor(dice.sample((1, 2, 3), dice.choice((1, 2))))
        count = torch.tensor([dice.randrange(0, 81 - int(at[s])) for s in slots])
        new = random_codes(len(slots), 80, bits, tables=2, seed=100 * seed + turn).view(torch.int16)
        for i, s in enumerate(slots.tolist()):
            others[s, at[s] : at[s] + count[i]] = new[i, : count[i]]
        add(tables, new[:, : max(1, int(count.max()))].view(torch.uint16), slots, count)
        at[slots] += count
        assert tables.stop.tolist() == at.tolist()
        for s in slots[count > 0].tolist():  # the others may still hold what was cut off
            here_alone = HashTables(*(x[s : s + 1] for x in (tables.ids, tables.offsets, tables.stop)), size, first)
            held_to(back(here_alone), others[s : s + 1].view(torch.uint16))
        for s in (1, 2, 3):
            at[s] = dice.choice((int(at[s]), dice.randrange(first, int(at[s]) + 1)))
        tables.stop.copy_(at)
    assert all(torch.equal(x[0], y) for x, y in zip((tables.ids, tables.offsets), untouched, strict=True))


def test_many_keys_of_one_code() -> None:
    """More than are ordered, counted or moved at a time."""
    known = torch.zeros(1, 700, 2, 1, dtype=torch.int16)
    known[0, ::7] = 1
    known[0, 350:] = 3
    tables = fresh(1, 700, 2, 65536, 0, tables=1)
    at = 0
    for count in (300, 1, 399):
        add(tables, known[:, at : at + count].view(torch.uint16), torch.tensor([0]), torch.tensor([count]))
        at += count
        held_to(back(tables), known.view(torch.uint16))


def moved(case: Case) -> Case:
    t = case.tables
    tables = HashTables(t.ids.to(PLACE), t.offsets.to(PLACE), t.stop.to(PLACE), t.size, t.first)
    return Case(here(case.rows), here(case.kv), here(case.centre), tables, here(case.queries), case.keys)


def same(got: Collisions, want: Collisions) -> None:
    assert torch.equal(got.count.cpu(), want.count) and torch.equal(got.looked_up.cpu(), want.looked_up)
    fits = want.count <= want.index.shape[2]
    used = fits[..., None] & (torch.arange(want.index.shape[2]) < want.count[..., None])
    for mine, theirs in ((got.index, want.index), (got.met, want.met)):
        assert mine.dtype == theirs.dtype and torch.equal(mine.cpu()[used], theirs[used])


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_keys_and_weights(share: Any, seed: int) -> None:
    dice = random.Random(seed)
    case = hashed(
        [dice.choice((1, 3, 4, 40, 77)) for _ in range(dice.choice((1, 3)))], group=dice.choice((1, 2, 5)),
        count=dice.choice((1, 3)), bits=dice.choice((1, 2, 4)), number=dice.choice((3, 9)),
        size=dice.choice((8, 16, 65536)), first=dice.choice((0, 3, 20)), page=dice.choice((None, 7)), seed=seed,
        dtype=dice.choice((torch.float32, torch.float16)),
    )  # fmt: skip
    if dice.random() < 0.5:
        case.tables.stop.sub_(dice.randrange(20))
    there = moved(case)
    for least, capacity, floor in ((1, 100, 0.0), (2, 100, 0.1), (2, 3, 0.0), (3, 40, 0.0)):
        how = {"share": share, "least": least, "capacity": capacity}
        want = collide(case.rows, case.tables, case.queries, **how, impl="reference")
        got = collide(there.rows, there.tables, there.queries, **how, impl="triton")
        same(got, want)
        weights = weigh(there.rows, there.kv, there.tables, got, there.centre, floor=floor, impl="triton")
        exact = weigh(case.rows, case.kv, case.tables, want, case.centre, floor=floor, impl="reference")
        used = (want.count <= capacity)[..., None] & (torch.arange(capacity) < want.count[..., None])
        for mine, right in zip(weights, exact, strict=True):
            torch.testing.assert_close(mine.cpu()[used], right[used], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bits", [1, 8, 11])
@pytest.mark.parametrize("number", [20, 150])
def test_weights_of_rare_and_of_sure_keys(bits: int, number: int) -> None:
    """From a key equal to the query to one opposite to it, and vectors without a direction: fp32 keeps 5 digits of u.

    The cosine's own rounding moves u of rare keys by bits times as much, so it is compared with exact cosines.
    """
    angle = torch.linspace(0, torch.pi, 60, dtype=torch.float64)
    k = torch.stack([angle.cos(), angle.sin()], 1)
    k = torch.cat([k * torch.logspace(-3, 3, 60)[:, None], torch.tensor([[0, 0], [torch.inf, 0], [torch.nan, 1]])])
    case = hashed([63], group=1, count=1, bits=2, number=number, size=65536, first=0)
    tables = HashTables.empty(1, 2, 70, bits=bits, tables=number)
    tables.stop.fill_(63)
    kv = case.kv
    kv.k.zero_()
    kv.k[0, :, :63, :2] = k.float()
    q = torch.zeros(1, 2, 16)
    q[..., 0] = 3.0
    index = torch.arange(63, dtype=torch.int32).expand(1, 2, -1).contiguous()
    found = Collisions(
        index, torch.full((1, 2), 63, dtype=torch.int32), "query", torch.ones_like(index, dtype=torch.uint8),
        torch.zeros(1, 2, dtype=torch.int32), 2,
    )  # fmt: skip
    rows = type(case.rows)(q, torch.tensor([0]), torch.tensor([62]))
    centre = torch.zeros(1, 2, 16)
    wide = type(kv)(kv.k.double(), kv.v.double(), kv.seq_lens)
    exact, rest = weigh(type(rows)(q.double(), rows.seq, rows.pos), wide, tables, found, centre, impl="reference")
    there = HashTables(here(tables.ids), here(tables.offsets), here(tables.stop), tables.size)
    gone = Collisions(*(here(x) if isinstance(x, Tensor) else x for x in vars(found).values()))
    got, factor = (x.cpu() for x in weigh(here(rows), here(kv), there, gone, here(centre), impl="triton"))
    torch.testing.assert_close(factor, rest, rtol=0, atol=1e-5)
    assert bool(got.isfinite().all())
    close = (got - exact).abs() <= 1e-5 + 2e-6 * bits * exact.abs().clamp(min=1)
    assert bool(close[..., :50].all()) and bool(close[..., 60:].all()), (got - exact).abs().amax(0)


def test_what_the_kernels_cannot_do_is_refused() -> None:
    case = moved(hashed([30]))
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        codes(case.rows.q.double(), projections(16, 4, 9, 0).to(PLACE), impl="triton")
    found = collide(case.rows, case.tables, case.queries, capacity=30, impl="triton")
    wide = (type(case.rows)(case.rows.q.double(), case.rows.seq, case.rows.pos),
            type(case.kv)(case.kv.k.double(), case.kv.v.double(), case.kv.seq_lens))  # fmt: skip
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        weigh(*wide, case.tables, found, case.centre, impl="triton")


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_follows_tables_that_grow() -> None:
    """One graph: keys are added, looked up and weighed; replayed, it gives what separate calls give."""
    case = hashed([70, 66], bits=3, size=16, first=3)
    there, every = moved(case), torch.arange(2, device=PLACE)
    tables = fresh(2, 75, 3, 16, 3, tables=9)
    mirror = HashTables(*(x.clone() for x in (tables.ids, tables.offsets, tables.stop)), 16, 3)
    keys, count = here(case.keys[:, 3:63]).view(torch.int16), torch.full((2,), 2, device=PLACE)
    new = keys[:, :2].clone()

    def step(into: HashTables) -> tuple[Collisions, Weights]:
        build(into, new.view(torch.uint16), every, count, impl="triton")
        found = collide(there.rows, into, there.queries, capacity=75, impl="triton")
        return found, weigh(there.rows, there.kv, into, found, there.centre, impl="triton")

    step(HashTables(*(x.clone() for x in (tables.ids, tables.offsets, tables.stop)), 16, 3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, weights = step(tables)
    for at in range(0, 60, 2):
        new.copy_(keys[:, at : at + 2])
        count.fill_(at % 4 // 2 + 1)
        graph.replay()
        want, exact = step(mirror)
        assert torch.equal(tables.stop, mirror.stop)
        same(found, Collisions(*(x.cpu() if isinstance(x, Tensor) else x for x in vars(want).values())))
        used = torch.arange(75, device=PLACE) < found.count[..., None]
        assert all(torch.equal(mine[used], right[used]) for mine, right in zip(weights, exact, strict=True))


SMALL = triton_attention.Tuning(
    room=32, buckets=64, pieces=16, scanned=16, vector=1, splits=2, merged=4
)  # several parts, rounds and pieces


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tune", [SMALL, None], ids=["small", "default"])
@pytest.mark.covering
def test_attend_sampled(share: Any, group: int, page: int | None, dtype: torch.dtype, tune: Any) -> None:
    held_to_reference(last_rows([60, 33, 7, 2], group=group, page=page, dtype=dtype), share, tune)


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("limit", [1, 6])
def test_attend_sampled_to_everything(share: Any, limit: int) -> None:
    """Lists that are too long, some of a row's or all."""
    held_to_reference(last_rows([90, 50], group=4), share, SMALL, limit=torch.tensor([limit, limit + 1]))


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("given", [{"least": 1}, {"least": 3}, {"floor": 0.3}, {"softcap": 1.5}], ids=str)
def test_attend_sampled_with_other_terms(given: dict[str, Any], share: Any) -> None:
    held_to_reference(last_rows([150, 40]), share, SMALL, **given)


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("sinks", [0, 3, 20])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.covering
def test_many_keys_that_are_always_attended_to(share: Any, sinks: int, page: int | None) -> None:
    """Blocks of them, fewer and more than parts."""
    held_to_reference(many_left(sinks, page), share, SMALL, sinks=sinks)


@pytest.mark.parametrize("share", ["own", "group"])
def test_tables_that_begin_after_the_first_segment(share: Any) -> None:
    held_to_reference(last_rows([150, 77, 90], first=37), share, SMALL)
    held_to_reference(last_rows([150, 45, 39, 9], first=37), share, SMALL, sinks=37)  # two have no keys in the tables


@pytest.mark.parametrize("limit", [None, 1])
def test_parts_are_merged_in_several_rounds(limit: int | None) -> None:
    """Five parts, and three pieces of all keys, two at a time."""
    tune = replace(SMALL, merged=2, splits=3)
    most_of = None if limit is None else torch.tensor([limit, limit])
    held_to_reference(last_rows([150, 97], few_left=60), "group", tune, limit=most_of)


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("kind", ["zero", "queries", "keys"])
def test_void_vectors_in_several_parts(kind: str, share: Any) -> None:
    case, finite = void_vectors(kind)
    held_to_reference(case, share, SMALL, heads=finite)


@pytest.mark.parametrize(("number", "bits"), [(255, 10), (256, 10), (257, 10), (300, 10)])
def test_keys_met_in_every_table(number: int, bits: int) -> None:
    """Counters hold the number of tables: those of 8 bits would start again, or run into the next head's, from 256 on.

    Keys are alike to one query head each, and rarely meet the others.
    """
    case = last_rows([40], heads=1, group=3, number=number, bits=bits, size=64)
    case.centre.zero_()
    for head in range(3):
        case.kv.k[0, 0, 5 + 8 * head : 10 + 8 * head] = 2 * case.rows.q[0, head]
    stop = case.tables.stop
    case = tabled(case.rows, case.kv, case.centre, bits=bits, number=number, size=64)
    case.tables.stop.copy_(stop)
    for head in range(3):
        met = (case.keys[0, 5 + 8 * head : 10 + 8 * head, 0].long() == case.queries[0, head].long()).sum(-1)
        assert met.tolist() == [number] * 5
    held_to_reference(case, "own", SMALL)


def held_to_reference(
    case: Case, share: Any, tune: Any, *, limit: Tensor | None = None, heads: Sequence[int] | None = None, **given: Any
) -> None:
    """heads: whose output is compared. The tables are of more sequences than the view, in another order."""
    limit = most(case) if limit is None else limit
    some = slice(None) if heads is None else list(heads)
    want = one_call(case, limit, share, "reference", **given)
    terms = {"least": 2, "floor": 0.0, "softcap": None, "sinks": SINKS, **given}
    slots, tables, centre = scattered(case)
    partial, lists, numbers = triton_attention.attend_sampled(
        *here((case.rows, case.kv, slots, tables, drawn_for(case), centre, limit)), own=share == "own", scale=SCALE,
        tune=tune, **terms,
    )  # fmt: skip
    most_off = 3e-5 if case.kv.k.dtype == torch.float32 else 2e-3  # weights are rounded to the values' dtype
    out, lse = partial.out.cpu()[:, some], partial.lse.cpu()[:, some]
    torch.testing.assert_close(out, want.partial.out[:, some], rtol=0, atol=most_off, check_dtype=False)
    torch.testing.assert_close(lse, want.partial.lse[:, some], rtol=0, atol=3e-5, check_dtype=False)
    assert lists is None and torch.equal(numbers.cpu(), want.numbers)
