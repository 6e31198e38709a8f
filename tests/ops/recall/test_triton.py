"""The kernels of recall, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.errors import Unsupported
from longreach.ops import RowRange, Rows, recall
from longreach.ops.recall import triton
from longreach.testing.inputs import random_kv, random_rows
from tests.ops.attend.kernels import HALF, here, needs_gpu
from tests.ops.recall.cases import Case, check, make_case
from tests.tiers import swept


def run(case: Case, impl: str = "triton") -> Any:
    stop, start = here(case.stop), None if case.start is None else here(case.start)
    return [x.cpu() for x in recall(here(case.rows), here(case.blocks), start, stop, **case.options, impl=impl)]


@pytest.mark.parametrize("seed", swept(range(60), 16))
def test_any_case(seed: int) -> None:
    case = make_case(seed, half=HALF)
    check(case, *run(case))


@pytest.mark.parametrize("seed", swept(range(200, 260), 10))
@pytest.mark.parametrize("full", [0, float("inf")])
def test_one_kernel_or_two(seed: int, full: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, whatever the number of rows."""
    tune = triton.Tuning(full=full)
    monkeypatch.setattr(triton, "Tuning", lambda: tune)
    case = make_case(seed, half=HALF, ties=seed % 2 == 0)
    if seed % 2 == 0:
        case.options.update(pool="sum", scale=0.1)
    check(case, *run(case), exact=seed % 2 == 0)


@pytest.mark.parametrize("seed", swept(range(100, 140), 10))
def test_the_later_of_equal_scores(seed: int) -> None:
    case = make_case(seed, half=HALF, ties=True)
    case.options.update(pool="sum", scale=0.1)
    check(case, *run(case), exact=True)


@pytest.mark.parametrize("pool", ["softmax", "sum"])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_groups_of_query_heads(pool: str, group: int) -> None:
    blocks = random_kv([70, 9], heads=2, dim=24, page=16, dtype=HALF, seed=group)
    rows = random_rows(blocks, 5, group=group, seed=group)
    case = Case(rows, blocks, None, blocks.seq_lens[rows.seq], {"count": 4, "scale": 0.2, "pool": pool})
    check(case, *run(case))


TUNINGS = [
    triton.Tuning(tile=16, per_sm=1), triton.Tuning(tile=64, blocks=32, chunk=16), triton.Tuning(full=float("inf")),
    triton.Tuning(full=0),
]  # fmt: skip


@pytest.mark.parametrize("tune", TUNINGS)
@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_however_the_work_is_cut(tune: triton.Tuning, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two sequences by turns, many at once and 16 at a time."""
    monkeypatch.setattr(triton, "Tuning", lambda: tune)
    monkeypatch.setattr(triton, "AT_ONCE", at_once)
    blocks = random_kv([90, 40], heads=2, dim=16, dtype=HALF)
    rows = random_rows(blocks, 37, group=2)
    held = blocks.seq_lens[rows.seq]
    start, stop = (torch.rand(2, 37) * (held + 1)).long().sort(0).values
    for pool in ("softmax", "sum"):
        case = Case(rows, blocks, start, stop, {"count": 5, "scale": 0.3, "pool": pool})
        check(case, *run(case))


def test_rows_described_by_the_host() -> None:
    blocks = random_kv([40, 33], heads=1, dim=16, dtype=HALF)
    q, seq = torch.randn(20, 2, 16).to(HALF), torch.tensor([0] * 15 + [1] * 5)
    rows = Rows(q, seq, torch.arange(20), (RowRange(15, 0), RowRange(5, 1)))
    case = Case(rows, blocks, None, torch.arange(20), {"count": 3, "scale": 0.3, "pool": "softmax"})
    check(case, *run(case))


@pytest.mark.parametrize("pool", ["softmax", "sum"])
def test_nan_and_infinities(pool: str) -> None:
    """As the reference has them: NaN counts as -inf, in its own sequence and head."""
    blocks = random_kv([20, 20], heads=2, dim=8)
    rows = Rows(torch.randn(2, 4, 8).abs(), torch.tensor([0, 1]), torch.tensor([0, 0]))
    blocks.k[0, 0, 3], blocks.k[0, 1, 5], blocks.k[1, 1, 7] = torch.nan, torch.inf, -torch.inf
    case = Case(rows, blocks, None, torch.tensor([20, 20]), {"count": 18, "scale": 0.3, "pool": pool})
    for got, want in zip(run(case), run(case, "reference"), strict=True):
        assert torch.equal(got, want)


def test_more_blocks_than_there_are() -> None:
    blocks = random_kv([5, 0], heads=1, dim=8)
    rows = Rows(torch.randn(2, 2, 8), torch.tensor([0, 1]), torch.tensor([0, 0]))
    case = Case(rows, blocks, None, torch.tensor([5, 0]), {"count": 100, "scale": 0.3, "pool": "sum"})
    index, used = run(case)
    assert used.tolist() == [[5], [0]] and index[0, 0, :5].tolist() == [0, 1, 2, 3, 4] and not index[0, 0, 5:].any()


def test_what_the_kernels_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_kv([5], heads=1, dim=8)
    rows = random_rows(blocks, 1)
    given: dict[str, Any] = {"count": 2, "scale": 0.1, "pool": "sum", "impl": "triton"}
    stop = torch.tensor([5])
    with pytest.raises(Unsupported, match="choose up to 512 blocks, got 513; use impl='reference'"):
        recall(here(rows), here(blocks), None, here(stop), **given | {"count": 513})
    double = random_kv([5], heads=1, dim=8, dtype=torch.float64)
    with pytest.raises(Unsupported, match="for fp64 use impl='reference'"):
        recall(here(random_rows(double, 1)), here(double), None, here(stop), **given)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="run on CUDA devices, got cpu"):
        recall(rows, blocks, None, stop, **given)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["softmax", "sum"])
def test_a_captured_graph_follows_ranges(pool: str) -> None:
    blocks = here(random_kv([60, 9], heads=2, dim=64, page=16, dtype=HALF))
    rows = here(replace(random_rows(random_kv([1, 1], heads=2, dim=64), 2, group=4), seq=torch.arange(2)))
    rows = replace(rows, q=rows.q.to(HALF), runs=(RowRange(1, 0), RowRange(1, 1)))
    stop, options = here(torch.tensor([60, 9])), dict[str, Any](count=6, scale=0.2, pool=pool)
    recall(rows, blocks, None, stop, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, used = recall(rows, blocks, None, stop, **options)
    for ends in ((60, 9), (3, 0), (31, 8)):
        stop.copy_(torch.tensor(ends))
        graph.replay()
        torch.cuda.synchronize()
        case = Case(replace(rows, q=rows.q.cpu(), seq=rows.seq.cpu(), pos=rows.pos.cpu()),
                    replace(blocks, k=blocks.k.cpu(), v=blocks.v.cpu(), seq_lens=blocks.seq_lens.cpu(),
                            block_table=blocks.block_table.cpu()), None, stop.cpu(), options)  # fmt: skip
        check(case, index.cpu(), used.cpu())
