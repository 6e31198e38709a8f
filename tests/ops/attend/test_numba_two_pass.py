"""The Numba kernels of passes that keep logits, compiled for this CPU, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import (
    KVView,
    Rows,
    Spans,
    attend_from_logits,
    attend_with_logits,
    pooled_scores,
    relative,
    score_keys,
)
from longreach.ops.attend import Entries, attend_amend, score_and_pool
from longreach.ops.attend import numba as kernel
from longreach.ops.attend.two_pass import (
    FROM_LOGITS_IMPLEMENTATIONS,
    SCORE_IMPLEMENTATIONS,
    WITH_LOGITS_IMPLEMENTATIONS,
)
from longreach.ops.types import ScoringKeys
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend, exact_pooled_scores
from longreach.testing.selections import random_lists, random_selection
from longreach.testing.tolerance import pooled_bound, unit_roundoff, within
from tests.ops.attend.kept import check_kept, check_values
from tests.ops.attend.kernels import HARDWARE
from tests.ops.attend.test_amend import SCALE, entries, expected, places
from tests.ops.cases import make_case
from tests.tiers import swept

TILES = 3


def check_pooled(rows: Rows, kv: KVView, *, scale: float = 0.3, **more: Any) -> None:
    """score_and_pool, and pooled_scores of what score_keys kept, by row and by tile; values are gone by then."""
    blind = replace(kv, v=torch.full_like(kv.v, torch.nan))
    softcap = more.get("softcap")
    lse, kept = score_keys(rows, blind, scale=scale, **more, impl="numba")
    sunk = exact_attend(rows, kv, Spans.dense(), scale=scale, **more)
    tile = torch.randint(TILES, rows.seq.shape, dtype=rows.seq.dtype)
    reached = torch.arange(kv.capacity) < torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1)[:, None, None]
    unread = replace(blind, k=torch.full_like(kv.k, torch.nan))
    given: dict[str, Any] = {"scale": scale, "lse": lse, "logits": kept, "impl": "numba"}
    for got, of in (
        (score_and_pool(rows, blind, scale=scale, **more, impl="numba"), {}),
        (pooled_scores(rows, unread, **given), {}),
        (pooled_scores(rows, unread, **given, tile=tile, tiles=TILES), {"tile": tile, "tiles": TILES}),
    ):
        want = exact_pooled_scores(rows, kv, scale=scale, softcap=softcap, lse=sunk.lse, **of)
        assert got.shape == want.shape and got.dtype == torch.float32
        seen = torch.ones_like(want, dtype=torch.bool) if of else reached.expand_as(want)
        bound = pooled_bound(want, sunk, HARDWARE * unit_roundoff(torch.float32))
        within("scores", got.double()[seen], want[seen], bound[seen])
        assert not bool(got[seen & (want == 0)].any())


@pytest.mark.parametrize("seed", swept(range(120), 40))
def test_any_case(seed: int) -> None:
    case = make_case(seed)
    kv = replace(case.kv, slot_pos=None)
    for values in (True, False):
        assert check_kept(case.rows, kv, impl="numba", values=values, **case.logits).top is None
    selection = case.selection if case.kv.slot_pos is None and seed % 3 else random_lists(case.rows, kv, seed=seed)
    check_values(case.rows, kv, selection, impl="numba", **case.logits)
    check_pooled(case.rows, kv, **case.logits)


@pytest.mark.covering
@pytest.mark.parametrize("dim", [8, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([150, 0, 67], heads=2, dim=dim, dtype=dtype, page=16 if dim % 32 else None, memory="packed")
    rows = random_rows(kv, 4, group=4)
    for values in (True, False):
        check_kept(rows, kv, impl="numba", values=values)
    check_values(rows, kv, random_lists(rows, kv, weighted=True), impl="numba")


@pytest.mark.covering
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_groups(group: int) -> None:
    kv = random_kv([33, 21], heads=2, dim=16, page=5)
    rows = random_rows(kv, 3, group=group)
    check_kept(rows, kv, impl="numba", values=group % 2 == 0, softcap=3.0)
    for per in ("kv", "query"):
        for kind in ("spans", "lists", "packed"):
            check_values(rows, kv, random_selection(kind, rows, kv, per=per, seed=group), impl="numba")
    check_pooled(rows, kv, softcap=3.0, sink_logit=torch.randn(2 * group))


def test_pieces_of_one_row_are_merged(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LEAST", 7)
    kv = random_kv([1300, 0, 3], heads=2, dim=32, page=16, dtype=torch.bfloat16)
    rows = replace(random_rows(kv, 4, group=2), seq=torch.tensor([0, 1, 2, 0]), pos=torch.tensor([1299, 0, 2, 350]))
    sink = torch.randn(4)
    for values in (True, False):
        check_kept(rows, kv, impl="numba", values=values, sink_logit=sink)
    check_values(rows, kv, random_lists(rows, kv, weighted=True), impl="numba", sink_logit=sink)
    check_pooled(rows, kv, sink_logit=sink)


@pytest.mark.parametrize("page", [None, 4])
def test_values_are_not_read_to_score_nor_keys_for_values(page: int | None) -> None:
    kv = random_kv([60, 31], heads=2, dim=16, page=page)
    rows = random_rows(kv, 6)
    lists = random_lists(rows, kv, seed=2)
    lse, kept = score_keys(rows, kv, scale=0.3, impl="numba")
    want = attend_from_logits(rows, kv, lists, kept, impl="numba")
    unseen = replace(kv, k=kv.k.clone(), v=torch.full_like(kv.v, torch.nan))
    for b in range(2):  # nor are keys past what the rows of a sequence can see
        furthest = max([int(p) for s, p in zip(rows.seq, rows.pos, strict=True) if int(s) == b], default=-1)
        for g in range(2):
            poison(unseen, b, g, range(furthest + 1, (60, 31)[b]))
    again, same = score_keys(rows, unseen, scale=0.3, impl="numba")
    assert torch.equal(again, lse)
    for r, reach in enumerate(torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1).tolist()):
        assert torch.equal(same.x[r, :, :reach], kept.x[r, :, :reach])
        kept.x[r, :, reach:] = torch.nan  # logits past what a row reaches are not used
    spoilt = replace(kv, k=torch.full_like(kv.k, torch.nan), v=kv.v.clone())
    read = lists.streamed(rows, kv)
    for b, length in enumerate((60, 31)):
        for g in range(2):
            used = read[rows.seq == b][:, g].any(0)
            poison(spoilt, b, g, (n for n in range(length) if not bool(used[n])))
    got = attend_from_logits(rows, spoilt, lists, kept, impl="numba")
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_a_key_that_is_poison_shows() -> None:
    kv = random_kv([300], heads=1, dim=16)
    rows = Rows(torch.randn(1, 2, 16), torch.zeros(1, dtype=torch.int64), torch.tensor([299]))
    kv.k[0, 0, 170] = torch.nan
    whole, kept = attend_with_logits(rows, kv, scale=0.3, impl="numba")
    assert bool(whole.out.isnan().all()) and bool(whole.lse.isnan().all())
    assert bool(kept.x[0, 0, 170].isnan().all())


def test_entries_go_on_with_lists() -> None:
    """test_amend.py has spans. Lists are cut at a bound of each query head, and so are lists that overflow."""
    kv = random_kv([40, 0, 21], heads=2, dim=16, page=8)
    rows = random_rows(kv, 3, group=2, seed=3)
    take, put = places(3, 4)
    split = relative(torch.tensor([[-6, -1, -30, 2]]).repeat(3, 1))
    for overflow in (0.0, 0.5):
        lists = random_lists(rows, kv, per="query", weighted=True, overflow=overflow, seed=4)
        given = entries()
        kept = Entries(*(x.clone() for x in given))
        entry, result = expected(rows, kv, lists, split, given, take, None)
        got, lse = attend_amend(rows, kv, lists, split, kept, take, put, scale=SCALE, impl="numba")
        close: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}
        for mine, want in ((got.out, result[0]), (got.lse, result[1]), (lse, entry[1])):
            torch.testing.assert_close(mine.double(), want, **close)
        some = put >= 0
        torch.testing.assert_close(kept.out[put[some].long()].double(), entry[0][some], **close)


def test_no_rows_and_no_keys() -> None:
    kv = random_kv([0, 0], heads=2, dim=16)
    for values in (True, False):
        assert check_kept(random_rows(kv, 0), kv, impl="numba", values=values).x.shape == (0, 2, 3, 2)
        check_kept(random_rows(kv, 3), kv, impl="numba", values=values, sink_logit=torch.tensor([1.0, 2.0, 3.0, -9.0]))
    for rows in (random_rows(kv, 0), random_rows(kv, 3)):
        check_values(rows, kv, Spans.dense(), impl="numba")
        check_pooled(rows, kv)


def test_what_the_kernels_cannot_do_is_refused_and_left_to_the_reference() -> None:
    device = torch.device("cpu")
    kv = random_kv([9], heads=1, dim=16)
    rows = random_rows(kv, 1)
    double, evicted = random_kv([5], heads=1, dim=16, dtype=torch.float64), random_kv([9], heads=1, evicted=True)
    wants = replace(rows, q=rows.q.clone().requires_grad_())
    copy = ScoringKeys(torch.zeros(kv.k.shape, dtype=torch.int8), torch.ones(kv.k.shape[:3]))
    for given, message in (
        ((random_rows(double, 1), double), "it computes in fp32; for fp64 use impl='reference'"),
        ((wants, kv), "no backward pass and an input requires a gradient"),
        ((random_rows(evicted, 1), evicted), "slots in the order of their positions"),
    ):
        for op in (attend_with_logits, score_keys, score_and_pool):
            with pytest.raises(Unsupported, match=message):
                op(*given, scale=1.0, impl="numba")
        assert SCORE_IMPLEMENTATIONS.choose("auto", device, *given) == "reference"
    with pytest.raises(Unsupported, match="score_keys's Numba kernel: it scores keys as they are"):
        score_keys(rows, kv, scale=1.0, keys=copy, impl="numba")
    assert SCORE_IMPLEMENTATIONS.choose("auto", device, rows, kv, copy) == "reference"
    with torch.no_grad():
        assert SCORE_IMPLEMENTATIONS.choose("auto", device, wants, kv) == "numba"
    with pytest.raises(Unsupported, match="sums kept logits: give the logits and the lse"):
        pooled_scores(rows, kv, scale=1.0, impl="numba")
    many = rows.take(torch.zeros(9, dtype=torch.int64))  # a matrix product serves them better
    for op in (WITH_LOGITS_IMPLEMENTATIONS, SCORE_IMPLEMENTATIONS, FROM_LOGITS_IMPLEMENTATIONS):
        assert op.choose("auto", device, rows, kv) == "numba"
        assert op.choose("auto", device, many, kv) == "reference"
