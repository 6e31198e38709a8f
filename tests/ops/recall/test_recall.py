"""Blocks chosen by their codes, beside loops in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import InvalidInput, UnknownName
from longreach.ops import KVView, Lists, RowRange, Rows, recall, reference_chunks
from longreach.testing.inputs import random_kv, random_rows
from tests.ops.recall.cases import Case, check, make_case
from tests.tiers import swept


def run(case: Case, impl: str = "reference") -> Any:
    return recall(case.rows, case.blocks, case.start, case.stop, **case.options, impl=impl)


@pytest.mark.parametrize("seed", swept(range(40), 12))
def test_any_case(seed: int) -> None:
    case = make_case(seed)
    check(case, *run(case))


@pytest.mark.parametrize("seed", swept(range(100, 140), 12))
def test_the_later_of_equal_scores(seed: int) -> None:
    """Sums of signs are exact, so equal scores are equal."""
    case = make_case(seed, ties=True)
    case.options.update(pool="sum", scale=0.1)
    check(case, *run(case), exact=True)


@pytest.mark.parametrize("pool", ["softmax", "sum"])
def test_blocks_that_are_all_the_same(pool: Any) -> None:
    """The last blocks of the range are chosen, whatever their number."""
    for length in (1, 5, 31, 200):
        k = torch.ones(1, 2, length, 8)
        blocks = KVView(k, k, torch.tensor([length]))
        rows = Rows(torch.randn(3, 4, 8), torch.zeros(3).long(), torch.arange(3))
        stop = torch.tensor([length, length // 2, 0])
        index, used = recall(rows, blocks, None, stop, count=4, scale=0.3, pool=pool)
        for row, end in enumerate(stop.tolist()):
            want = list(range(max(0, end - 4), end))
            for head in range(2):
                assert index[row, head, : used[row, head]].tolist() == want


@pytest.mark.parametrize("pool", ["softmax", "sum"])
def test_fp64(pool: str) -> None:
    blocks = random_kv([30, 9], heads=2, dim=16, page=4, dtype=torch.float64)
    rows = random_rows(blocks, 6, group=3)
    options = {"count": 3, "scale": 0.25, "pool": pool}
    case = Case(rows, blocks, None, blocks.seq_lens[rows.seq], options)
    check(case, *run(case), exact=True)


@pytest.mark.parametrize("pool", ["softmax", "sum"])
@pytest.mark.parametrize("at_once", [1, 100, 1000])
def test_rows_computed_together_change_nothing(pool: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_kv([60, 33], heads=2, dim=16, dtype=torch.float64)
    rows = random_rows(blocks, 12, group=2)
    case = Case(rows, blocks, None, blocks.seq_lens[rows.seq], {"count": 5, "scale": 0.25, "pool": pool})
    want = run(case)
    monkeypatch.setattr(reference_chunks, "SCORES_AT_ONCE", at_once)
    for got, expected in zip(run(case), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("pool", ["softmax", "sum"])
def test_nan_stays_in_its_sequence_and_counts_as_lowest(pool: str) -> None:
    blocks = random_kv([20, 20], heads=1, dim=8)
    rows = Rows(torch.randn(2, 2, 8), torch.tensor([0, 1]), torch.tensor([0, 0]))
    case = Case(rows, blocks, None, torch.tensor([20, 20]), {"count": 3, "scale": 0.3, "pool": pool})
    index, used = run(case)
    blocks.k[0, 0, int(index[0, 0, 1])] = torch.nan
    got, count = run(case)
    assert torch.equal(got[1], index[1]) and torch.equal(count, used)
    if pool == "sum":
        assert int(index[0, 0, 1]) not in got[0, 0].tolist()
    else:  # every softmax over it is NaN: scores are equal
        assert got[0, 0].tolist() == [17, 18, 19]


def test_blocks_outside_of_the_range_are_not_read() -> None:
    blocks = random_kv([20], heads=2, dim=8)
    rows = Rows(torch.randn(1, 4, 8), torch.zeros(1).long(), torch.zeros(1).long())
    case = Case(rows, blocks, torch.tensor([3]), torch.tensor([17]), {"count": 5, "scale": 0.3, "pool": "softmax"})
    want = run(case)
    blocks.k[0, :, :3], blocks.k[0, :, 17:] = torch.nan, torch.nan
    for got, expected in zip(run(case), want, strict=True):
        assert torch.equal(got, expected)


def test_the_result_is_a_selection() -> None:
    blocks = random_kv([6], heads=2, dim=8)
    keys = random_kv([48], heads=2, dim=8)
    rows = Rows(torch.randn(2, 4, 8), torch.zeros(2).long(), torch.tensor([47, 40]))
    index, used = recall(rows, blocks, None, torch.tensor([6, 1]), count=4, scale=0.3, pool="sum")
    mask = Lists(index, used, block=8, all_visible=True).mask(rows, keys)
    assert mask.sum(-1).tolist() == [[32, 32], [8, 8]]


def test_no_gradient() -> None:
    blocks, rows = random_kv([6], heads=1, dim=8), Rows(torch.randn(1, 1, 8), torch.zeros(1).long(), torch.tensor([3]))
    rows = replace(rows, q=rows.q.requires_grad_())
    index, _ = recall(rows, blocks, None, torch.tensor([6]), count=2, scale=1.0, pool="softmax")
    assert not index.requires_grad


def test_runs_change_nothing() -> None:
    blocks = random_kv([12], heads=1, dim=8)
    rows = Rows(torch.randn(4, 2, 8), torch.zeros(4).long(), torch.arange(4))
    case = Case(rows, blocks, None, torch.tensor([12, 3, 7, 9]), {"count": 2, "scale": 0.3, "pool": "softmax"})
    described = replace(case, rows=replace(rows, runs=(RowRange(4, 0, 0),)))
    for got, want in zip(run(described), run(case), strict=True):
        assert torch.equal(got, want)


def wrong_calls() -> list[tuple[dict[str, Any], str]]:
    blocks = random_kv([9, 3], heads=2, dim=8)
    rows = random_rows(blocks, 3)
    good = {"rows": replace(rows, seq=torch.tensor([0, 1, 1])), "blocks": blocks, "start": None}
    good |= {"stop": torch.tensor([9, 3, 0]), "count": 2, "scale": 0.3, "pool": "sum"}
    evicted = random_kv([9, 3], heads=2, dim=8, evicted=True)
    return [
        (good | {"rows": None}, "rows: expected Rows, got NoneType"),
        (good | {"blocks": None}, "blocks: expected a KVView, got NoneType"),
        (good | {"blocks": evicted}, "blocks: expected blocks in order, and this view has positions"),
        (good | {"blocks": random_kv([9, 3], heads=2, dim=16)}, "head dim: q has 8, k has 16"),
        (good | {"blocks": random_kv([9, 3], heads=2, dim=8, dtype=torch.float16)}, "dtype: q is float32"),
        (good | {"stop": None}, r"stop: expected int \[R=3\] on cpu, got NoneType"),
        (good | {"stop": torch.zeros(2).long()}, r"stop: expected int \[R=3\] on cpu, got int64\[2\]"),
        (good | {"stop": torch.zeros(3)}, "stop: expected int .* got float32"),
        (good | {"stop": torch.tensor([9, 4, 0])}, "stop: expected at most the blocks of the row's seq.*, got 4 of 3"),
        (good | {"start": torch.tensor([0, -1, 0])}, "start: expected >= 0, got -1"),
        (good | {"start": 0}, "start: expected int .* got int"),
        *((good | {"count": x}, "count: expected a count of blocks >= 1") for x in (0, -1, 2.0, True, 1 << 30)),
        *((good | {"scale": x}, "scale: expected a finite number") for x in (float("nan"), float("inf"), None)),
        (good | {"pool": "mean"}, "pool: expected one of softmax, sum, got 'mean'"),
    ]


@pytest.mark.parametrize(("given", "message"), wrong_calls(), ids=range(len(wrong_calls())))
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        recall(**given)


def test_an_unknown_implementation() -> None:
    case = make_case(1)
    with pytest.raises(UnknownName, match="unknown impl of recall 'fast'; known: auto, reference"):
        run(case, "fast")
