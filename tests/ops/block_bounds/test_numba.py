"""block_bounds' Numba kernels against plain loops: bounds exactly, scores within a derived bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import RowRange, Rows
from longreach.ops.block_bounds import SCORING, bound_and_score, bound_blocks, bound_newest, score_blocks
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.tolerance import within
from tests.ops.block_bounds.cases import Case, all_blocks, bounded, empty_bounds, exact_scores, make_case, newest_of
from tests.tiers import swept


def check_scores(got: torch.Tensor, case: Case) -> None:
    want, error = exact_scores(case)
    seen = ~want.isnan()
    assert got.shape == want.shape and got.dtype == torch.float32
    within("scores", got.double()[seen], want[seen], error[seen])


def same(case: Case, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for got, exact in zip((case.low, case.high), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", swept(range(40), 16))
def test_any_case(half: torch.dtype, seed: int) -> None:
    case = make_case(seed, half=half)
    want = bounded(case, all_blocks(case))
    seq, block = torch.tensor(all_blocks(case), dtype=case.kv.seq_lens.dtype).view(-1, 2).unbind(1)
    bound_blocks(case.kv, case.low, case.high, seq, block, case.per, impl="numba")
    same(case, want)
    check_scores(score_blocks(case.rows, case.kv, case.low, case.high, case.per, slot=case.slot, impl="numba"), case)


@pytest.mark.parametrize("seed", swept(range(40, 60), 8))
@pytest.mark.parametrize("fused", [False, True])
def test_the_newest_block_alone(seed: int, fused: bool) -> None:
    case = make_case(seed)
    newest = [(int(seq), block) for seq, block in zip(case.rows.seq, newest_of(case), strict=True)]
    low, high = bounded(case, [pair for pair in all_blocks(case) if pair not in newest])
    case = replace(case, low=low, high=high)
    want = bounded(case, newest)
    if fused:
        got = bound_and_score(case.rows, case.kv, low, high, case.per, slot=case.slot, impl="numba")
        check_scores(got, case)
    else:
        bound_newest(case.rows, case.kv, low, high, case.per, slot=case.slot, impl="numba")
    same(case, want)


def test_one_row_a_sequence_in_several_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        kv = random_kv([170, 0, 49], heads=2, dim=72, page=24, dtype=torch.bfloat16)
        runs = tuple(RowRange(1, seq) for seq in range(3))
        rows = replace(random_rows(kv, 3, group=4), seq=torch.arange(3), pos=kv.seq_lens - 1, runs=runs)
        case = Case(rows, kv, *empty_bounds(kv, 16), 16, None)
        newest = {(seq, block) for seq, block in enumerate(newest_of(case))}
        low, high = bounded(case, [pair for pair in all_blocks(case) if pair not in newest])
        case = replace(case, low=low, high=high)
        want = bounded(case, all_blocks(case))
        check_scores(bound_and_score(rows, kv, low, high, 16, impl="numba"), case)
        same(case, want)
    finally:
        torch.set_num_threads(before)


def test_blocks_without_filled_slots_change_nothing() -> None:
    kv = random_kv([5, 0], heads=1, dim=8, page=4)
    low, high = empty_bounds(kv, 4)
    bound_blocks(kv, low, high, torch.tensor([0, 0, 1, 0]), torch.tensor([2, -1, 0, 1000]), 4, impl="numba")
    assert bool(low.isnan().all()) and bool(high.isnan().all())
    assert score_blocks(random_rows(kv, 0), kv, low, high, 4, impl="numba").shape == (0, 1, 3)


def test_what_the_kernels_cannot_do_is_refused() -> None:
    kv = random_kv([5], heads=1, dim=8, dtype=torch.float64)
    rows, (low, high) = random_rows(kv, 1), empty_bounds(kv, 4)
    with pytest.raises(Unsupported, match="score_blocks's Numba kernel: it computes in fp32; for fp64"):
        score_blocks(rows, kv, low, high, 4, impl="numba")
    assert bound_and_score(rows, kv, low, high, 4).dtype == torch.float64  # "auto" is the reference for it


def test_auto_on_a_cpu() -> None:
    kv = random_kv([5], heads=1, dim=8)
    rows: Rows = random_rows(kv, 1)
    assert SCORING.choose("auto", torch.device("cpu"), rows, kv.k) == "numba"
    assert SCORING.choose("reference", torch.device("cpu"), rows, kv.k) == "reference"
