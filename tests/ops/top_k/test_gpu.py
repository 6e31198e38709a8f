"""top_k on a GPU: long rows, the slow path at length, atomics in any order, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longreach.ops import top_k
from longreach.ops.top_k import triton as kernels
from longreach.ops.top_k.triton_sample import SEARCHED
from tests.ops.top_k.brute import hard_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[1].cpu(), want[1].cpu())
    there = torch.arange(got[0].shape[2]) < want[1].cpu()[..., None]
    assert torch.equal(got[0].cpu()[there], want[0].cpu()[there])


@pytest.mark.parametrize("columns", [8192, 8193, 32_768, 131_072, 1_000_003])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_of_all_kinds(columns: int, share: float, dtype: torch.dtype) -> None:
    x = hard_rows(columns).to(dtype).cuda()
    k = int(share * columns)
    count = torch.full((1, x.shape[1]), k, device="cuda")
    length = torch.tensor([columns - 5], device="cuda")
    given = {"first": 4, "last": 100, "capacity": k + 10}
    want = top_k(x.cpu(), count.cpu(), length.cpu(), **given, impl="reference")
    for _ in range(5):
        same(top_k(x, count, length, **given), want)


def test_the_slow_path_at_length() -> None:
    """More numbers wanted than there are, and no room for candidates."""
    x = torch.randn(2, 8, 131_072)
    x[0] = torch.where(x[0] > 1, x[0], torch.nan)
    count, length = torch.full((2, 8), 30_000), torch.tensor([131_072, 100_000])
    want = top_k(x, count, length, capacity=30_000, impl="reference")
    tune = kernels.tuning(16, 131_072)
    for room, searched, rows in ((tune.room, tune.searched, 8), (1 << 12, 512, 16)):
        got = kernels.launch(
            x.cuda(), count.cuda(), length.cuda(), first=0, last=0, capacity=30_000,
            tune=replace(tune, room=room, searched=searched),
        )  # fmt: skip
        same(got[:2], want)
        assert got[2] is not None and int(got[2].marks[:, SEARCHED.value].sum()) == rows


@pytest.mark.parametrize("columns", [4096, 65_536])
def test_counts_and_lengths_grow_in_a_graph(columns: int) -> None:
    x = torch.randn(4, 8, columns, device="cuda")
    length = torch.tensor([0, 1, columns // 2, columns - 20], device="cuda")
    count = torch.zeros(4, 8, dtype=torch.int64, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        length.add_(1)
        count.copy_((length // 10).clamp(min=128)[:, None].expand(4, 8))
        x.mul_(1.01)
        return top_k(x, count, length, first=4, last=64, capacity=columns // 8)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for _ in range(6):
        graph.replay()
        torch.cuda.synchronize()
        given = {"first": 4, "last": 64, "capacity": columns // 8}
        same(result, top_k(x.cpu(), count.cpu(), length.cpu(), **given, impl="reference"))
