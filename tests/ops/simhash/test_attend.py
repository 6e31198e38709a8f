"""attend_sampled: the four ops and attention in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops import Lists, Partial, Rows, Span, Spans, absolute, attend, merge, relative
from longreach.ops.doors import op_named
from longreach.ops.simhash import NUMBERS, SampledAttention, attend_sampled, codes, collide, projections, weigh
from longreach.testing.inputs import poison
from tests.ops.attend.kernels import here
from tests.ops.simhash.cases import IMPLS, NUMBA, Case, hashed, scattered, tabled

SINKS, LOCAL, SCALE = 3, 5, 0.3
BITS, TABLES = 4, 9
EVERY = [*IMPLS, "triton"]


def last_rows(
    lengths: list[int], *, few_left: int | Tensor = LOCAL, number: int = TABLES, bits: int = BITS, **given: Any
) -> Case:
    """A row at the end of each sequence; its last `few_left` keys (int, or of each sequence) are in no table."""
    case = hashed(lengths, bits=bits, number=number, **given)
    seq = torch.arange(len(lengths)).flip(0)
    _, heads, dim = case.rows.q.shape
    q = torch.randn(len(lengths), heads, dim, generator=torch.Generator().manual_seed(9)).to(case.rows.q.dtype)
    case.tables.stop.copy_((torch.tensor(lengths) - few_left).clamp(min=case.tables.first))
    return case._replace(rows=Rows(q, seq, case.kv.seq_lens.long()[seq] - 1))


def drawn_for(case: Case) -> Tensor:
    return projections(case.kv.k.shape[3], case.tables.bits, case.tables.tables, 0)


def one_call(case: Case, limit: Tensor, share: Any, impl: str, **given: Any) -> SampledAttention:
    """Over tables and centres of more sequences, in another order than the view's."""
    slots, tables, centre = scattered(case)
    inputs = (case.rows, case.kv, slots, tables, drawn_for(case), centre, limit)
    if impl == "triton":
        inputs = here(inputs)
    terms = {"scale": SCALE, "sinks": SINKS, **given}
    partial, lists, numbers = attend_sampled(*inputs, share=share, impl=impl, **terms)
    if impl == "triton":
        partial = Partial(partial.out.cpu(), partial.lse.cpu())
    return SampledAttention(partial, lists, numbers.cpu())


def four_ops(
    case: Case, limit: Tensor, share: Any, *, least: int = 2, floor: float = 0.0, sinks: int = SINKS, **terms: Any
) -> tuple[Partial, Lists]:
    """The reference of each; lists above a row's limit overflow."""
    rows, kv, tables = case.rows, case.kv, case.tables
    found = collide(
        rows, tables, codes(rows.q, drawn_for(case), impl="reference"), capacity=int(limit.max()), least=least,
        share=share, impl="reference",
    )  # fmt: skip
    found = replace(found, count=torch.where(found.count > limit[:, None], int(limit.max()) + 1, found.count))
    lists = found.lists(weigh(rows, kv, tables, found, case.centre, floor=floor, impl="reference").log_weight)
    over, stop = lists.overflowed, tables.stop.long()[rows.seq, None].clamp(min=sinks)
    ends = torch.where(over, 0, sinks), torch.where(over, rows.pos[:, None] + 1, stop)
    always = Spans((Span(absolute(0), absolute(ends[0])), Span(absolute(ends[1]), relative(1))), lists.per)
    sink = terms.pop("sink_logit", None)
    terms = {"scale": SCALE, **terms, "impl": "reference"}
    return merge(attend(rows, kv, always, sink_logit=sink, **terms), attend(rows, kv, lists, **terms)), lists


def agree(case: Case, limit: Tensor, share: Any, impl: str, **given: Any) -> SampledAttention:
    want, lists = four_ops(case, limit, share, **given)
    got = one_call(case, limit, share, impl, **given)
    torch.testing.assert_close(got.partial.out, want.out, rtol=0, atol=3e-5, check_dtype=False)
    torch.testing.assert_close(got.partial.lse, want.lse, rtol=0, atol=3e-5, check_dtype=False)
    assert torch.equal(got.number("end"), case.tables.stop.long()[case.rows.seq, None].expand(-1, 2))
    over = lists.overflowed.unflatten(1, (2, -1)).sum(2)
    assert torch.equal(got.number("overflowed"), over)
    if got.lists is None:
        return got
    assert torch.equal(got.lists.count, lists.count) and torch.equal(got.lists.overflowed, lists.overflowed)
    assert got.lists.per == lists.per and got.lists.all_visible == lists.all_visible
    assert lists.log_weight is not None and got.lists.log_weight is not None
    for r in range(lists.count.shape[0]):
        for li in range(lists.count.shape[1]):
            n = 0 if lists.overflowed[r, li] else int(lists.count[r, li])
            assert torch.equal(got.lists.index[r, li, :n], lists.index[r, li, :n])
            weights = got.lists.log_weight[r, li, :n], lists.log_weight[r, li, :n]
            torch.testing.assert_close(*weights, rtol=0, atol=2e-5)
    return got


def most(case: Case) -> Tensor:
    """Limits that no list exceeds."""
    return case.rows.pos + 1


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("group", [1, 2, 5, 16])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.covering
def test_equals_the_four_ops(impl: str, share: Any, group: int, page: int | None, dtype: torch.dtype) -> None:
    case = last_rows([60, 33, 7, 2], group=group, page=page, dtype=dtype)
    union = agree(case, most(case), share, impl).number("union")
    assert int(union.sum()) > 5 and not bool(union[:2].any())  # two have no keys in the tables


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize(
    "given",
    [{"least": 1}, {"least": 3}, {"floor": 0.3}, {"softcap": 1.5}, {"sink_logit": torch.arange(4.0) - 1}],
    ids=str,
)
def test_terms(impl: str, share: Any, given: dict[str, Any]) -> None:
    case = last_rows([150, 40])
    agree(case, most(case), share, impl, **given)


def many_left(sinks: int = SINKS, page: int | None = None) -> Case:
    """Rows with 32, 33, 64, 101, 60 and 2 keys that are always attended to. The last two have no keys in the tables."""
    always = torch.tensor([32, 33, 64, 101, 60, 2])
    return last_rows([150, 131, 112, 140, 60, 2], few_left=always - sinks, first=sinks, page=page)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("sinks", [0, 3, 20])
@pytest.mark.covering
def test_many_keys_that_are_always_attended_to(impl: str, share: Any, sinks: int) -> None:
    case = many_left(sinks)
    got = agree(case, most(case), share, impl, sinks=sinks)
    always = torch.tensor([32, 33, 64, 101, 60, 2]).flip(0)[:, None]
    assert torch.equal(got.number("attended"), got.number("union") + always)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
def test_tables_that_begin_after_the_first_segment(impl: str, share: Any) -> None:
    """Keys between the sinks and the tables are left out; segments before the tables are not read."""
    case = last_rows([150, 77, 90], first=37)
    got = agree(case, most(case), share, impl)
    always = SINKS + LOCAL
    assert torch.equal(got.number("attended"), got.number("union") + always)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("share", ["own", "group"])
def test_lists_that_overflow_attend_to_everything(impl: str, share: Any) -> None:
    case = last_rows([90, 50], group=4)
    counts = four_ops(case, most(case), share)[1].count
    found = agree(case, counts.long().max(1).values - 1, share, impl)  # the longest list of each row
    over, each = found.number("overflowed"), counts.shape[1] // 2
    assert bool((over.sum(1) > 0).all()) and int(over.sum()) < counts.numel()
    assert bool((found.number("met")[over == each] == 0).all())
    assert bool((found.number("attended")[over > 0] == (case.rows.pos + 1)[:, None].expand(-1, 2)[over > 0]).all())
    found = agree(case, torch.ones(2, dtype=torch.int64), share, impl)
    dense = attend(case.rows, case.kv, Spans.dense(), scale=SCALE, impl="reference")
    over = (counts > 1).repeat_interleave(8 // counts.shape[1], 1)
    assert bool(over.any())
    torch.testing.assert_close(found.partial.out[over], dense.out[over], rtol=0, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize(
    ("impl", "threads"),
    [("reference", 1), *(pytest.param("numba", n, marks=NUMBA.marks) for n in (1, 3)), ("triton", 1)],
)
def test_numbers(impl: str, share: Any, threads: int) -> None:
    """By `collide` and by hand; the same with any number of threads."""
    case, before = last_rows([170, 41], group=3, seed=4), torch.get_num_threads()
    found = collide(case.rows, case.tables, codes(case.rows.q, drawn_for(case)), capacity=170, share=share,
                    impl="reference")  # fmt: skip
    torch.set_num_threads(threads)
    try:
        got = agree(case, most(case), share, impl)
    finally:
        torch.set_num_threads(before)
    each, group = (3, 3) if share == "own" else (1, 3)
    stop = case.tables.stop.long()[case.rows.seq]
    segments = -(-stop // 16)  # the first one begins at 0
    offsets = segments * group * TABLES * 2 * 2
    for g in range(2):
        lists = range(each * g, each * (g + 1))
        keys = [torch.cat([found.index[r, li, : found.count[r, li]] for li in lists]).unique() for r in range(2)]
        union = torch.tensor([len(some) for some in keys])
        always = SINKS + case.rows.pos + 1 - stop.clamp(min=SINKS)
        met = torch.tensor([sum(int(found.met[r, li, : found.count[r, li]].sum()) for li in lists) for r in range(2)])
        read = 2 * found.looked_up.long()[:, lists.start : lists.stop].sum(1) + offsets
        expected = {"union": union, "met": met, "overflowed": 0 * union, "weighed": union, "attended": union + always,
                    "searched": read, "end": stop}  # fmt: skip
        assert tuple(expected) == NUMBERS
        for name, want in expected.items():
            assert torch.equal(got.number(name)[:, g], want), name


@pytest.mark.parametrize("impl", EVERY)
@pytest.mark.parametrize("share", ["own", "group"])
def test_what_is_not_sampled_is_not_read(impl: str, share: Any) -> None:
    """Keys and values outside the sample, past the row, and in unused memory hold NaN."""
    case = last_rows([64], group=2, page=8)
    whole, lists = agree(case, most(case), share, impl), four_ops(case, most(case), share)[1]
    read = torch.zeros(2, 64, dtype=torch.bool)
    read[:, :SINKS] = read[:, int(case.tables.stop[0]) :] = True
    for li in range(lists.count.shape[1]):
        head = li if share == "group" else li // 2
        read[head, lists.index[0, li, : lists.count[0, li]].long()] = True
    assert not bool(read.all())
    for head in range(2):
        poison(case.kv, 0, head, (~read[head]).nonzero()[:, 0].tolist())
    got = one_call(case, most(case), share, impl)
    torch.testing.assert_close(got.partial.out, whole.partial.out, rtol=0, atol=0)


def void_vectors(kind: str) -> tuple[Case, list[int]]:
    """Queries and keys without a direction among others, and the query heads of which the output must be finite.

    "zero": zeros, and NaN. "queries", "keys": finite vectors with an infinite squared norm; the other side is so short
    that no logit is large. In each, some keys equal the centre.
    """
    case, far, at = hashed([90], group=4), 1e19, torch.arange(90)
    q, k = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(5)), case.kv.k[0].transpose(0, 1)
    centre = case.centre if kind == "zero" else torch.zeros_like(case.centre)
    if kind == "zero":
        q[0, 3] = torch.nan
        k[12, 1, 0] = torch.nan  # its values are finite
    elif kind == "queries":
        q[0, [0, 2, 5, 7]] *= far
        k[:90] *= 3 / far
    else:
        q *= 3 / far
        k[:90][at % 3 == 0] *= far
    q[0, 1] = q[0, 6] = 0.0
    k[:90][at % 5 == 1] = centre[0]
    case = tabled(Rows(q, torch.tensor([0]), torch.tensor([89])), case.kv, centre, bits=2)
    case.tables.stop.fill_(85)
    return case, [0, 1, 2] if kind == "zero" else list(range(8))


@pytest.mark.parametrize("impl", EVERY)
@pytest.mark.parametrize("share", ["own", "group"])
@pytest.mark.parametrize("kind", ["zero", "queries", "keys"])
def test_void_vectors(impl: str, share: Any, kind: str) -> None:
    """Their weights are finite and those of `weigh`; NaN reaches only the heads that attend to it."""
    case, finite = void_vectors(kind)
    got, (want, lists) = one_call(case, most(case), share, impl), four_ops(case, most(case), share)
    assert bool(want.out[0, finite].isfinite().all()) and bool(want.out[0, 3].isfinite().all()) == (kind != "zero")
    near: dict[str, Any] = {"rtol": 0, "atol": 3e-5, "check_dtype": False, "equal_nan": True}
    torch.testing.assert_close(got.partial.out, want.out, **near)
    torch.testing.assert_close(got.partial.lse, want.lse, **near)
    assert torch.equal(got.number("met").sum(), sum_of_met(case, share))
    assert lists.log_weight is not None and bool(lists.log_weight[..., : int(lists.count.min())].isfinite().all())


def sum_of_met(case: Case, share: Any) -> Tensor:
    found = collide(case.rows, case.tables, case.queries, capacity=100, share=share, impl="reference")
    return torch.where(torch.arange(100) < found.count[..., None], found.met, 0).sum()


@pytest.mark.parametrize("impl", EVERY)
def test_tables_without_keys(impl: str) -> None:
    case = last_rows([12, 4], few_left=99)
    got = one_call(case, most(case), "group", impl)
    dense = attend(case.rows, case.kv, Spans.dense(), scale=SCALE, impl="reference")
    torch.testing.assert_close(got.partial.out, dense.out, rtol=0, atol=1e-5)
    assert not got.number("union").any() and not got.number("searched").any()


def test_bytes_are_those_of_the_four_ops() -> None:
    case = last_rows([90, 50], group=4)
    op, drawn = op_named("simhash_attend"), projections(16, BITS, TABLES, 0)
    assert op.layer == ("rows", "kv", "slots", "scale", "softcap", "sink_logit")
    for share in ("own", "group"):
        counts = four_ops(case, most(case), share)[1].count
        limit = counts.long().max(1).values - 1  # the longest list of each row overflows
        got = one_call(case, limit, share, "reference")
        reads = op.reads(case.rows, case.kv, got, case.tables, drawn, case.centre, limit, sinks=SINKS)
        found = collide(case.rows, case.tables, codes(case.rows.q, drawn), capacity=int(limit.max()), share=share)
        found = replace(found, count=torch.where(found.count > limit[:, None], int(limit.max()) + 1, found.count))
        weights = weigh(case.rows, case.kv, case.tables, found, case.centre)
        (coding,) = op_named("simhash_codes").reads(case.rows, case.kv, weights, case.rows.q, drawn)
        (looking,) = op_named("simhash_collide").reads(case.rows, case.kv, found, case.tables, weights)
        keys, centres = op_named("simhash_weigh").reads(case.rows, case.kv, weights, case.tables, found, case.centre)
        assert got.lists is not None
        assert reads[0] == coding and reads[1] == centres
        assert isinstance(reads[2].other, Tensor) and isinstance(looking.other, Tensor)
        assert torch.equal(reads[2].other.sum(1), looking.other)
        for mine, wanted in ((reads[3].selection, keys.selection), (reads[5].selection, got.lists)):
            assert mine is not None and wanted is not None
            assert torch.equal(mine.keys_read(case.rows, case.kv), wanted.keys_read(case.rows, case.kv))
        assert reads[3].value_bytes == 0 < reads[4].value_bytes == reads[5].value_bytes
        plain = one_call(case, limit, share, "reference")._replace(lists=None)  # as from Triton
        few = op.reads(case.rows, case.kv, plain, case.tables, drawn, case.centre, limit, sinks=SINKS)
        assert few[:2] == reads[:2] and (few[3].value_bytes, few[4].value_bytes) == (0, reads[5].value_bytes)
        assert few[3].counted is not None and few[4].counted is not None
        assert torch.equal(torch.as_tensor(few[3].counted), got.number("weighed"))
        assert torch.equal(torch.as_tensor(few[4].counted), got.number("attended"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": torch.ones(3, dtype=torch.int64)}, r"limit: expected int32 or int64 \[2\]"),
        ({"slots": torch.tensor([0, 2])}, r"slots: expected in \[0, B=2\), got 0 to 2"),
        ({"slots": torch.tensor([0.0, 1.0])}, r"slots: expected int32 or int64 \[2\]"),
        ({"projections": torch.zeros(9, 4, 16)}, "projections: expected torch.bfloat16"),
        ({"centre": torch.zeros(2, 2, 8)}, "centre: expected torch.float32"),
        ({"least": 0}, "least"),
        ({"least": 10}, "least"),
        ({"share": "all"}, "share: expected 'own' or 'group'"),
        ({"sinks": -1}, "sinks: expected a count >= 0"),
        ({"floor": 1.0}, r"floor: expected a number in \[0, 1\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = last_rows([20, 9])
    given = {
        "slots": torch.arange(2), "tables": case.tables, "projections": projections(16, BITS, TABLES, 0),
        "centre": case.centre, "limit": most(case), "scale": SCALE,
    }  # fmt: skip
    attend_sampled(case.rows, case.kv, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=message):
        attend_sampled(case.rows, case.kv, **{**given, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", [NUMBA])
def test_who_computes(impl: str) -> None:
    case = last_rows([20, 9])
    with pytest.raises(UnknownName, match="cuda"):
        one_call(case, most(case), "group", "cuda")
    wide = case._replace(
        rows=replace(case.rows, q=case.rows.q.double()),
        kv=replace(case.kv, k=case.kv.k.double(), v=case.kv.v.double()),
    )
    with pytest.raises(Unsupported, match="fp64"):
        one_call(wide, most(case), "group", impl)
    assert one_call(wide, most(case), "group", "auto").partial.out.dtype == torch.float64
