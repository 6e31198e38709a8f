"""Attention to summaries with the choice of blocks, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, Unsupported
from longreach.ops import KVView, Rows
from longreach.ops.partial import merge_pieces
from longreach.ops.recall import attend_summaries, recall_and_attend, triton, triton_attending
from longreach.ops.selection import Span, Spans, absolute
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.oracle import exact_attend
from tests.ops.attend.kernels import HALF, held_to, here
from tests.ops.recall.cases import Case, check, make_case
from tests.tiers import swept

impls = pytest.mark.parametrize("impl", ["reference", "triton"])


def with_values(blocks: KVView, seed: int) -> KVView:
    """Mean values that are not the mean keys; NaN where these are."""
    v = torch.randn(blocks.v.shape, generator=torch.Generator().manual_seed(seed)).to(blocks.k.dtype)
    return replace(blocks, v=torch.where(blocks.k.isnan(), blocks.k, v))


def checked(case: Case, impl: str) -> None:
    """The choice is that of `recall`, the pieces are the attention to all blocks of a row."""
    count, scale = case.options["count"], case.options["scale"]
    rows, blocks, stop = here(case.rows), here(case.blocks), here(case.stop)
    start = None if case.start is None else here(case.start)
    index, used, pieces = recall_and_attend(rows, blocks, start, stop, count=count, scale=scale, impl=impl)
    check(replace(case, options=case.options | {"pool": "softmax"}), index.cpu(), used.cpu())
    alone = attend_summaries(rows, blocks, start, stop, scale=scale, impl=impl)
    first = torch.zeros_like(case.stop) if case.start is None else case.start
    chosen = Spans((Span(absolute(first[:, None]), absolute(case.stop[:, None])),))
    last = Rows(case.rows.q, case.rows.seq, torch.full_like(case.rows.pos, case.blocks.capacity))
    want = exact_attend(last, case.blocks, chosen, scale=scale)
    for got in (pieces, alone):
        held_to(merge_pieces(got), want, case.rows.q.dtype)


@impls
@pytest.mark.parametrize("seed", swept(range(60), 16))
def test_any_case(impl: str, seed: int) -> None:
    case = make_case(seed, half=HALF)
    checked(replace(case, blocks=with_values(case.blocks, seed)), impl)


@pytest.mark.parametrize("group", [1, 3, 5, 16])
@pytest.mark.parametrize("dim", swept([80, 128, 256], 1))
def test_groups_and_head_dims(group: int, dim: int) -> None:
    blocks = with_values(random_kv([70, 9, 0], heads=2, dim=dim, page=16, dtype=HALF, seed=group), 1)
    rows = random_rows(blocks, 5, group=group, seed=group)
    held = blocks.seq_lens[rows.seq]
    checked(Case(rows, blocks, None, held, {"count": 4, "scale": dim**-0.5, "pool": "softmax"}), "triton")


@impls
def test_the_later_of_equal_blocks(impl: str) -> None:
    k = torch.ones(1, 1, 40, 16)
    k[:, :, 7] = 2.0
    blocks, pos = here(KVView(k, k, torch.tensor([40]))), torch.tensor([0])
    rows = here(Rows(torch.ones(1, 2, 16), pos, pos))
    index, used, _ = recall_and_attend(rows, blocks, None, here(torch.tensor([30])), count=4, scale=0.1, impl=impl)
    assert index[0, 0].tolist() == [7, 27, 28, 29] and used.tolist() == [[4]]


def test_one_reading_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the logits: blocks that fit a program at once, and chunks of them, give the same."""
    blocks = with_values(random_kv([90, 40], heads=2, dim=16, dtype=HALF), 0)
    rows = random_rows(blocks, 5, group=2)
    case = Case(rows, blocks, None, blocks.seq_lens[rows.seq], {"count": 5, "scale": 0.3, "pool": "softmax"})
    for chunk in (32, 1024):
        monkeypatch.setattr(triton_attending, "Tuning", partial(triton.Tuning, chunk=chunk))
        checked(case, "triton")


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_kv([5], heads=1, dim=8)
    rows, stop = random_rows(blocks, 1), torch.tensor([5])
    given: dict[str, Any] = {"scale": 0.1, "impl": "triton"}
    with pytest.raises(InvalidInput, match="count: expected a count of blocks >= 1, got 0"):
        recall_and_attend(rows, blocks, None, stop, count=0, **given)
    with pytest.raises(InvalidInput, match="stop: expected at most the blocks of the row's sequence, got 6 of 5"):
        attend_summaries(rows, blocks, None, stop + 1, **given)
    with pytest.raises(Unsupported, match="choose up to 512 blocks, got 513"):
        recall_and_attend(here(rows), here(blocks), None, here(stop), count=513, **given)
    double = random_kv([5], heads=1, dim=8, dtype=torch.float64)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        attend_summaries(here(random_rows(double, 1)), here(double), None, here(stop), **given)
