"""sample on a GPU: long rows, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from longreach.ops import sample, uniforms
from longreach.ops.sample.api import Sampled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def close(got: Sampled, want: Sampled) -> None:
    """Complete, ascending lists, and but for columns at which sums are next to a whole number the same ones."""
    got, want = (Sampled(*(each.cpu() for each in found)) for found in (got, want))
    assert torch.equal(got.used, want.used)
    there = torch.arange(got.columns.shape[2]) < got.used[..., None]
    assert bool(((got.columns.diff() > 0) | ~there[..., 1:]).all())
    same = got.columns == want.columns
    assert float(same[there].double().mean() if there.any() else 1) > 0.999
    torch.testing.assert_close(got.log_weight[same & there], want.log_weight[same & there], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.factor[same & there], want.factor[same & there], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [8192, 8193, 32_768, 131_072, 1_000_003])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows(columns: int, share: float, dtype: torch.dtype) -> None:
    spread = torch.tensor([0.5, 2.0, 6.0])[:, None]
    x = torch.randn(1, 3, columns).mul(spread).exp().to(dtype).cuda()
    count = torch.full((1, 3), int(share * columns), device="cuda")
    given = (x, count, torch.tensor([columns - 5], device="cuda"), torch.rand(1, 3, device="cuda").double())
    for power in (1.0, 0.5):
        options = {"capacity": int(share * columns) + 10, "first": 4, "last": 100, "power": power}
        want = sample(*(each.cpu() for each in given), **options, impl="reference")
        first = sample(*given, **options)
        close(first, want)
        for _ in range(3):
            again = sample(*given, **options)
            there = torch.arange(again.columns.shape[2], device="cuda") < again.used[..., None]
            assert all(torch.equal(a[there], b[there]) for a, b in zip(first[::2], again[::2], strict=True))


@pytest.mark.parametrize("columns", [4096, 65_536])
def test_counts_and_lengths_grow_in_a_graph(columns: int) -> None:
    x = torch.rand(4, 8, columns, device="cuda") ** 8
    length = torch.tensor([0, 1, columns // 2, columns - 20], device="cuda")
    count = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
    heads, offset = torch.arange(8, device="cuda"), torch.zeros(4, 8, dtype=torch.float64, device="cuda")
    options = {"first": 4, "last": 64, "capacity": columns // 8}

    def step() -> Sampled:
        length.add_(1)
        count.copy_((length // 10).clamp(min=128)[:, None].expand(4, 8))
        x.mul_(1.01)
        offset.copy_(uniforms(0, 1, length, heads))
        return sample(x, count, length, offset, **options)

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
        close(result, sample(x.cpu(), count.cpu(), length.cpu(), offset.cpu(), **options, impl="reference"))
