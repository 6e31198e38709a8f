"""Logits kept, and passes over them, in the reference: against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from longreach.ops import Rows, Spans, attend, attend_from_logits, attend_with_logits, score_keys
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.selections import random_lists, random_selection
from tests.ops.attend.kept import check_kept, check_values
from tests.ops.cases import Case, cases


@settings(max_examples=60, deadline=None)
@given(cases)
def test_any_case(case: Case) -> None:
    for values in (True, False):
        check_kept(case.rows, case.kv, impl="reference", values=values, **case.logits)
    check_values(case.rows, case.kv, case.selection, impl="reference", **case.logits)


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_groups_and_dtypes(group: int, dtype: torch.dtype) -> None:
    kv = random_kv([33, 21], heads=2, dim=16, page=5, dtype=dtype)
    rows = random_rows(kv, 4, group=group)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert check_kept(rows, kv, impl="reference", values=False).x.dtype == wide
    for per in ("kv", "query"):
        check_values(rows, kv, random_selection("lists", rows, kv, per=per, seed=group), impl="reference")


def test_over_everything_it_is_the_dense_result() -> None:
    kv = random_kv([33, 0, 21], heads=2, dim=16, page=5)
    rows = random_rows(kv, 6, group=3)
    shape: dict[str, Any] = {"scale": 0.3, "softcap": 2.0, "impl": "reference"}
    sink = torch.randn(6)
    whole, kept = attend_with_logits(rows, kv, **shape, sink_logit=sink)
    dense = attend(rows, kv, Spans.dense(), **shape, sink_logit=sink)
    again = attend_from_logits(rows, kv, Spans.dense(), kept, sink_logit=sink, impl="reference")
    lse, _ = score_keys(rows, kv, **shape, sink_logit=sink)
    assert torch.equal(whole.out, dense.out) and torch.equal(whole.lse, dense.lse)
    torch.testing.assert_close(again.out, dense.out)
    torch.testing.assert_close(again.lse, dense.lse)
    torch.testing.assert_close(lse, dense.lse)


def test_values_are_not_read_to_score_nor_keys_for_values() -> None:
    kv = random_kv([33, 21], heads=2, dim=16, page=5)
    rows = random_rows(kv, 5)
    lists = random_lists(rows, kv, seed=3)
    lse, kept = score_keys(rows, kv, scale=0.3, impl="reference")
    want = attend_from_logits(rows, kv, lists, kept, impl="reference")
    no_values = replace(kv, v=torch.full_like(kv.v, torch.nan))
    again, same = score_keys(rows, no_values, scale=0.3, impl="reference")
    assert torch.equal(again, lse) and torch.equal(same.x.nan_to_num(7.0), kept.x.nan_to_num(7.0))
    spoilt = replace(kv, k=torch.full_like(kv.k, torch.nan), v=kv.v.clone())
    read = lists.streamed(rows, kv)
    for b, length in enumerate((33, 21)):
        for g in range(2):
            used = read[rows.seq == b][:, g].any(0)
            poison(spoilt, b, g, (n for n in range(length) if not bool(used[n])))
    got = attend_from_logits(rows, spoilt, lists, kept, impl="reference")
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    b, g, n = int(rows.seq[int(read.any(2).any(1).nonzero()[0])]), *read.any(0).nonzero()[0].tolist()
    mine = read[rows.seq == b][:, g].any(0)
    poison(spoilt, b, g, [int(mine.nonzero()[0])] if bool(mine.any()) else [n])
    assert bool(attend_from_logits(rows, spoilt, lists, kept, impl="reference").out.isnan().any())


def test_nothing_is_seen() -> None:
    kv = random_kv([0, 5], heads=2, dim=8)
    rows = Rows(torch.randn(2, 4, 8), torch.tensor([0, 1]), torch.tensor([3, -1]))
    lse, kept = score_keys(rows, kv, scale=1.0, impl="reference")
    assert bool((lse == -torch.inf).all())
    assert bool(attend_from_logits(rows, kv, Spans.dense(), kept, impl="reference").is_empty.all())
    assert bool(kept.x.isnan().all())  # past what a row reaches lies nothing that may be used
    assert score_keys(random_rows(kv, 0), kv, scale=1.0)[0].shape == (0, 4)
