"""Bounds of blocks, reference and Triton, against plain loops: bounds exactly, scores within a derived bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.errors import InvalidInput, UnknownName, Unsupported
from longreach.ops import RowRange, Rows
from longreach.ops.block_bounds import (
    bound_and_score,
    bound_blocks,
    bound_newest,
    score_blocks,
    triton,
    units_per_page,
)
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.tolerance import within
from tests.ops.attend.kernels import HALF, here, needs_gpu
from tests.ops.block_bounds.cases import (
    Case,
    all_blocks,
    bounded,
    empty_bounds,
    exact_scores,
    make_case,
    newest_of,
    unit_of,
)
from tests.tiers import swept

impls = pytest.mark.parametrize("impl", ["reference", "triton"])


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def on_device(case: Case) -> Case:
    slot = None if case.slot is None else here(case.slot)
    return Case(here(case.rows), here(case.kv), here(case.low.clone()), here(case.high.clone()), case.per, slot)


def check_scores(got: Tensor, case: Case) -> None:
    want, error = exact_scores(case)
    seen = ~want.isnan()
    assert got.shape == want.shape and got.dtype == torch.float32
    within("scores", got.double().cpu()[seen], want[seen], error[seen])


@impls
@pytest.mark.parametrize("seed", swept(range(24), 10))
def test_any_case(impl: str, seed: int) -> None:
    case = make_case(seed, half=HALF)
    given = on_device(case)
    seq, block = torch.tensor(all_blocks(case), dtype=case.kv.seq_lens.dtype).view(-1, 2).unbind(1)
    bound_blocks(given.kv, given.low, given.high, here(seq), here(block), case.per, impl=impl)
    want = bounded(case, all_blocks(case))
    for got, exact in zip((given.low, given.high), want, strict=True):
        same(got, exact)
    scores = score_blocks(given.rows, given.kv, given.low, given.high, case.per, slot=given.slot, impl=impl)
    check_scores(scores, case)
    if impl == "reference":  # so that reading what means nothing shows
        assert torch.equal(scores.isnan().cpu(), exact_scores(case)[0].isnan())


@impls
@pytest.mark.parametrize("seed", swept(range(40, 52), 4))
@pytest.mark.parametrize("single", [False, True])
def test_the_newest_block_alone(impl: str, seed: int, single: bool) -> None:
    """Bounds that lag one block behind: scores of the blocks before are right, in one launch too."""
    case = make_case(seed, half=HALF)
    if single:  # one row a sequence, as the host knows
        first = {int(seq): r for r, seq in reversed(list(enumerate(case.rows.seq.tolist())))}
        index = torch.tensor(sorted(first.values()), dtype=torch.int64)
        rows = case.rows.take(index)
        runs = tuple(RowRange(1, int(seq)) for seq in rows.seq)
        case = replace(case, rows=replace(rows, runs=runs), slot=None if case.slot is None else case.slot[index])
    newest = [(int(seq), block) for seq, block in zip(case.rows.seq, newest_of(case), strict=True)]
    low, high = bounded(case, [pair for pair in all_blocks(case) if pair not in newest])
    case = replace(case, low=low, high=high)
    want = bounded(case, newest)
    for fused in (False, True):
        given = on_device(case)
        if fused:
            scores = bound_and_score(given.rows, given.kv, given.low, given.high, case.per, slot=given.slot, impl=impl)
            check_scores(scores, case)
        else:
            bound_newest(given.rows, given.kv, given.low, given.high, case.per, slot=given.slot, impl=impl)
        for got, exact in zip((given.low, given.high), want, strict=True):
            same(got, exact)


@impls
def test_rows_that_complete_blocks_for_one_another(impl: str) -> None:
    """Several rows a sequence: the later row scores the block that the earlier one has just completed."""
    kv = random_kv([33], heads=2, dim=16, page=8, dtype=HALF)
    low, high = empty_bounds(kv, 16)
    rows = Rows(torch.randn(2, 4, 16).to(HALF), torch.zeros(2).long(), torch.tensor([31, 32]), (RowRange(2, 0, 31),))
    case = Case(rows, kv, low, high, 16, None)
    case = replace(case, **dict(zip(("low", "high"), bounded(case, [(0, 0)]), strict=True)))
    given = on_device(case)
    check_scores(bound_and_score(given.rows, given.kv, given.low, given.high, 16, impl=impl), case)


@pytest.mark.covering
@impls
@pytest.mark.parametrize("dim", [8, 72, 128, 256])
@pytest.mark.parametrize(("page", "per"), [(None, 16), (16, 16), (64, 16), (24, 16), (16, 100)])
def test_head_dims_and_pages(impl: str, dim: int, page: int | None, per: int) -> None:
    for dtype in (HALF, torch.float32):
        kv = random_kv([170, 0, 49], heads=2, dim=dim, page=page, dtype=dtype)
        rows = replace(random_rows(kv, 3, group=4), seq=torch.arange(3), pos=kv.seq_lens - 1)
        case = Case(rows, kv, *empty_bounds(kv, per), per, None)
        assert case.low.shape[2] == units_per_page(kv.page, per)
        case = replace(case, **dict(zip(("low", "high"), bounded(case, all_blocks(case)), strict=True)))
        given = on_device(case)
        check_scores(score_blocks(given.rows, given.kv, given.low, given.high, per, impl=impl), case)


@pytest.mark.parametrize(("dim", "group"), [(264, 3), (16, 128)])
def test_wide_heads_and_large_groups(dim: int, group: int) -> None:
    """Scored by the sums of the positive and of the negative parts of a group's queries."""
    kv = random_kv([70, 0, 49], heads=2, dim=dim, page=24, dtype=HALF)
    rows = replace(random_rows(kv, 3, group=group), seq=torch.arange(3), pos=kv.seq_lens - 1)
    case = Case(rows, kv, *empty_bounds(kv, 16), 16, None)
    case = replace(case, **dict(zip(("low", "high"), bounded(case, all_blocks(case)), strict=True)))
    given = on_device(case)
    check_scores(bound_and_score(given.rows, given.kv, given.low, given.high, 16, impl="triton"), case)


@pytest.mark.parametrize("tune", [triton.Tuning(chunk=512, per_sm=1), triton.Tuning(chunk=1024, slots=4, warps=1)])
def test_however_blocks_are_shared_out(tune: triton.Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "Tuning", lambda: tune)
    for seed in range(70, 76):
        case = make_case(seed, half=HALF)
        case = replace(case, **dict(zip(("low", "high"), bounded(case, all_blocks(case)), strict=True)))
        given = on_device(case)
        check_scores(
            score_blocks(given.rows, given.kv, given.low, given.high, case.per, slot=given.slot, impl="triton"), case
        )


@impls
def test_scores_bound_what_keys_score(impl: str) -> None:
    kv = random_kv([64], heads=2, dim=16)
    rows = Rows(torch.randn(1, 6, 16), torch.zeros(1).long(), torch.tensor([63]), (RowRange(1, 0),))
    case = Case(rows, kv, *empty_bounds(kv, 8), 8, None)
    low, high = (here(x) for x in bounded(case, all_blocks(case)))
    scores = score_blocks(here(rows), here(kv), low, high, 8, impl=impl).cpu()
    keys = (kv.k[0, :, :56] @ rows.q[0].view(2, 3, 16).transpose(1, 2)).sum(-1)  # [G, 56]
    assert bool((keys.view(2, 7, 8).amax(-1) <= scores[0, :, :7] + 1e-4).all())


@impls
def test_blocks_without_filled_slots_change_nothing(impl: str) -> None:
    kv = random_kv([5, 0], heads=1, dim=8, page=4)
    low, high = (here(x) for x in empty_bounds(kv, 4))
    seq, block = torch.tensor([0, 0, 1, 0]), torch.tensor([2, -1, 0, 1000])
    bound_blocks(here(kv), low, high, here(seq), here(block), 4, impl=impl)
    assert bool(low.isnan().all()) and bool(high.isnan().all())
    none = here(torch.empty(0).long())
    bound_blocks(here(kv), low, high, none, none, 4, impl=impl)
    assert score_blocks(here(random_rows(kv, 0)), here(kv), low, high, 4, impl=impl).shape == (0, 1, 3)


def wrong_calls() -> list[tuple[Callable[..., Any], dict[str, Any], str]]:
    kv = random_kv([9, 3], heads=2, dim=8, page=4)
    rows, bounds = random_rows(kv, 3), torch.zeros(kv.k.shape[0], 2, 2, 8)
    ints = torch.zeros(3).long()
    rest: dict[str, Any] = {"kv": kv, "low": bounds, "high": bounds, "per": 2}
    blocks = {"seq": ints, "block": ints} | rest
    evicted = random_kv([9, 3], heads=2, dim=8, page=4, evicted=True)
    return [
        (bound_blocks, blocks | {"per": 0}, "per: expected a count of slots >= 1, got 0"),
        (bound_blocks, blocks | {"per": 1}, r"low: expected torch.float32 \[P=7, G=2, units >= 4, D=8\] on cpu, got"),
        (bound_blocks, blocks | {"high": bounds.half()}, "high: expected torch.float32 .* got float16"),
        (bound_blocks, blocks | {"high": bounds[:-1]}, "high: expected"),
        (
            bound_blocks,
            blocks | {"low": torch.zeros(7, 2, 2, 16)[..., ::2]},
            "low: expected a contiguous last dimension",
        ),
        (bound_blocks, blocks | {"seq": ints.float()}, r"seq: expected int \[n\] on cpu, got float32"),
        (bound_blocks, blocks | {"block": ints[:2]}, r"block: expected \[3\] like seq, got int64\[2\]"),
        (bound_blocks, blocks | {"seq": ints + 2}, r"seq: expected in \[0, B=2\), got 2 to 2"),
        (bound_blocks, blocks | {"kv": None}, "kv: expected a KVView, got NoneType"),
        (bound_newest, {"rows": rows, **rest, "slot": ints[:2]}, r"slot: expected int \[R=3\] on cpu, got int64\[2\]"),
        (score_blocks, {"rows": rows, **rest, "kv": evicted}, "slot: expected the rows' slots, as slots are not"),
        (score_blocks, {"rows": None, **rest}, "rows: expected Rows, got NoneType"),
        (bound_and_score, {"rows": rows, **rest, "low": None}, "low: expected .* got NoneType"),
    ]


@pytest.mark.parametrize(("op", "given", "message"), wrong_calls(), ids=range(len(wrong_calls())))
def test_what_does_not_fit_is_refused(op: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        op(**given)


def test_what_the_kernels_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv([5], heads=1, dim=8)
    rows, bounds = random_rows(kv, 1), torch.zeros(1, 1, 8, 8)
    with pytest.raises(UnknownName, match="unknown impl of score_blocks 'fast'; known: auto, reference, triton"):
        score_blocks(rows, kv, bounds, bounds, 1, impl="fast")
    double = random_kv([5], heads=1, dim=8, dtype=torch.float64)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        bound_newest(random_rows(double, 1), double, bounds.double(), bounds.double(), 1, impl="triton")
    with pytest.raises(Unsupported, match="no backward pass"):
        score_blocks(replace(rows, q=rows.q.requires_grad_()), kv, bounds, bounds, 1, impl="triton")
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="run on CUDA devices, got cpu"), torch.no_grad():
        score_blocks(rows, kv, bounds, bounds, 1, impl="triton")


def test_fp64_is_exact_in_the_reference() -> None:
    kv = random_kv([20], heads=1, dim=8, dtype=torch.float64)
    rows = Rows(torch.randn(1, 2, 8).double(), torch.zeros(1).long(), torch.tensor([19]))
    low, high = empty_bounds(kv, 5)
    scores = bound_and_score(rows, kv, low, high, 5)
    assert scores.dtype == torch.float64 and scores.shape == (1, 1, 5)


@needs_gpu
@pytest.mark.gpu
def test_a_captured_graph_follows_lengths() -> None:
    """Lengths, positions and block tables change between replays."""
    kv = here(random_kv([60, 9], heads=2, dim=64, page=16, dtype=HALF))
    rows = here(replace(random_rows(random_kv([1, 1], heads=2, dim=64), 2, group=4), seq=torch.arange(2)))
    rows = replace(rows, q=rows.q.to(HALF), runs=(RowRange(1, 0), RowRange(1, 1)))
    low, high = (here(x) for x in empty_bounds(kv, 16))
    for step in range(2):  # compile, then capture
        if step:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                scores = bound_and_score(rows, kv, low, high, 16)
        else:
            bound_and_score(rows, kv, low, high, 16)
    for lengths in ((17, 9), (60, 1), (33, 4)):
        kv.seq_lens.copy_(torch.tensor(lengths))
        rows.pos.copy_(kv.seq_lens - 1)
        graph.replay()
        for b, n in enumerate(lengths):
            case = Case(rows, kv, low, high, 16, None)
            page, unit = unit_of(kv, b, (n - 1) // 16, 16)
            same(low[page, :, unit], bounded(case, [(b, (n - 1) // 16)])[0][page, :, unit].cpu())
    assert scores.shape == (2, 2, 5)
