"""The reference of pooled_scores against the fp64 oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from longreach.ops import KVView, Logits, Rows, Spans, attend, pooled_scores, score_keys
from longreach.testing.inputs import poison, random_kv, random_rows
from longreach.testing.oracle import exact_attend, exact_pooled_scores
from longreach.testing.tolerance import pooled_bound, unit_roundoff, within
from tests.ops.cases import Case, cases


def check(rows: Rows, kv: KVView, *, scale: float = 0.3, softcap: float | None = None, **more: Any) -> Tensor:
    """pooled_scores' result, after comparing it with the oracle's."""
    got = pooled_scores(rows, kv, scale=scale, softcap=softcap, **more, impl="reference")
    want = exact_pooled_scores(rows, kv, scale=scale, softcap=softcap, **more)
    dense = exact_attend(rows, kv, Spans.dense(), scale=scale, softcap=softcap)
    assert got.shape == want.shape
    limit = (
        kv.seq_lens[rows.seq].long() if kv.slot_pos is not None else torch.minimum(kv.seq_lens[rows.seq], rows.pos + 1)
    )
    past = (
        torch.arange(kv.capacity) >= limit[:, None, None]
    )  # what lies there means nothing, and is NaN so that it shows
    assert "tile" in more or bool(got.masked_select(past).isnan().all())
    got = got if "tile" in more else got.masked_fill(past, 0.0)
    within("scores", got.double(), want, pooled_bound(want, dense, unit_roundoff(got.dtype)))
    assert not bool(got[want == 0].any())
    return got


@settings(max_examples=60, deadline=None)
@given(cases)
def test_any_case(case: Case) -> None:
    rows, kv = case.rows, case.kv
    shape = {"scale": case.logits["scale"], "softcap": case.logits["softcap"]}
    got = check(rows, kv, **shape)
    assert got.dtype == torch.float32
    seen = attend(rows, kv, Spans.dense(), **shape)
    mass = (~seen.is_empty).unflatten(1, (kv.heads, -1)).sum(2).float()  # each query head hands out 1
    torch.testing.assert_close(got.sum(-1), mass, rtol=1e-4, atol=1e-4)
    check(rows, kv, **shape, lse=seen.lse)
    lse, kept = score_keys(rows, kv, **shape)
    from_kept(rows, kv, got, lse, kept)
    tile = torch.randint(0, 3, rows.seq.shape, generator=torch.Generator().manual_seed(case.seed), dtype=rows.seq.dtype)
    check(rows, kv, **shape, tile=tile, tiles=4)


def from_kept(rows: Rows, kv: KVView, want: Tensor, lse: Tensor, kept: Logits) -> None:
    """The same sums from kept logits, no key read: exact, and in fp16 beside the largest of 4 slots."""
    blind = replace(kv, k=torch.full_like(kv.k, torch.nan), v=torch.full_like(kv.v, torch.nan))
    got = pooled_scores(rows, blind, scale=0.3, lse=lse, logits=kept)
    torch.testing.assert_close(got.nan_to_num(0.0), want, rtol=1e-4, atol=1e-6)
    fill = -kv.capacity % 4
    x = torch.nn.functional.pad(kept.x.nan_to_num(0.0, neginf=0.0), (0, 0, 0, fill)) / math.log(2)
    top = x.unflatten(2, (-1, 4)).amax(3)
    low = (x - top.repeat_interleave(4, 2))[:, :, : kv.capacity]
    halved = Logits(low.half(), top, 4)
    got = pooled_scores(rows, blind, scale=0.3, lse=lse, logits=halved)
    torch.testing.assert_close(
        got.nan_to_num(0.0), want, rtol=2**-11 * 2 * -min(low.flatten().tolist(), default=0.0) + 1e-4, atol=1e-6
    )


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_groups_dims_and_dtypes(group: int, dim: int, dtype: torch.dtype) -> None:
    kv = random_kv([17, 9], heads=2, dim=dim, page=4, dtype=dtype)
    got = check(random_rows(kv, 4, group=group), kv)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("at_once", [1, 100])
def test_size_of_steps_does_not_matter(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.ops.reference_chunks.SCORES_AT_ONCE", at_once)
    kv = random_kv([17, 0, 9], heads=2, dim=8)
    rows = random_rows(kv, 10)
    check(rows, kv, tile=torch.arange(10) // 3, tiles=4)


def test_a_sink_takes_its_share_through_lse() -> None:
    kv = random_kv([17], heads=2, dim=8)
    rows = random_rows(kv, 3)
    sunk = attend(rows, kv, Spans.dense(), scale=0.3, sink_logit=torch.tensor([0.0, 1.0, 2.0, -torch.inf]))
    mass = check(rows, kv, lse=sunk.lse).sum(-1)
    assert bool((mass < 2).all()) and bool((mass > 0).all())


def test_nothing_is_seen() -> None:
    kv = random_kv([0, 5], heads=2, dim=8)
    rows = Rows(torch.randn(2, 4, 8), torch.tensor([0, 1]), torch.tensor([3, -1]))
    assert not check(rows, kv).any()
    assert not check(rows, kv, lse=torch.full((2, 4), -torch.inf)).any()
    assert check(random_rows(kv, 0), kv).shape == (0, 2, kv.capacity)
    assert not check(random_rows(kv, 0), kv, tile=torch.zeros(0, dtype=torch.int32), tiles=2).any()


def test_keys_no_row_can_see_and_all_values_are_never_read() -> None:
    kv = random_kv([17], heads=2, dim=8, page=4)
    rows = Rows(torch.randn(3, 4, 8), torch.zeros(3, dtype=torch.int64), torch.tensor([4, 9, 2]))
    before = pooled_scores(rows, kv, scale=0.3)
    kv.v.fill_(torch.nan)
    for head in range(2):
        poison(kv, 0, head, range(10, 17))
    assert torch.equal(pooled_scores(rows, kv, scale=0.3).nan_to_num(7.0), before.nan_to_num(7.0))
