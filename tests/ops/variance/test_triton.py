"""The Triton kernel of sampling_variance: in Python on a CPU, for real on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longreach.ops import sampling_variance
from longreach.ops.variance import triton
from tests.ops.attend.kernels import HALF, PLACE, here, here_all, needs_gpu
from tests.ops.variance.cases import Case, brute, case


def held_to(case: Case, **tune: Any) -> None:
    given, logits = [here(x) for x in case.given], here_all(case.logits)
    run = triton.sampling_variance if tune else sampling_variance
    got, want = run(*given, **logits, **(tune or {"impl": "triton"})), brute(case)
    assert got.dtype == torch.float32 and torch.equal(got.cpu() == 0, want == 0)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-5 if PLACE == "cpu" else 2e-4, atol=0)


@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("dim", [8, 72])
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.covering
def test_definition(
    per: Any, group: int, dim: int, page: int | None, dtype: torch.dtype, softcap: float | None
) -> None:
    held_to(case([23, 41], count=3, per=per, group=group, dim=dim, page=page, dtype=dtype, softcap=softcap))


def test_other_lists() -> None:
    for other in (
        {"weighted": False}, {"shared": True}, {"shared": True, "per": "query"}, {"memory": "packed"},
        {"memory": "tokens", "page": 4, "ints": torch.int32},
    ):  # fmt: skip
        held_to(case([23, 41], count=3, **other))  # type: ignore[arg-type]


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into as many pieces as there are programs to spare, each of several rounds."""
    held_to(case([200], count=2, room=190), keys=8)
    monkeypatch.setattr(triton, "PROGRAMS", 12)
    held_to(case([200], count=2, room=190), keys=8)


def test_entries_of_no_visible_slot_are_skipped() -> None:
    """On a GPU they are not refused, as reading them would be a sync."""
    some = case([60], count=2, room=12)
    index = torch.arange(12, dtype=torch.int32).mul(3).expand(2, 2, 12).contiguous()
    lists = replace(some.lists, index=index, count=torch.full((2, 2), 10), log_weight=torch.zeros(2, 2, 12))
    want = sampling_variance(some.rows, some.kv, lists, torch.ones(2, 2, 12), some.whole, **some.logits)
    index[..., 10:] = torch.tensor([60, -7])
    more = replace(lists, count=torch.full((2, 2), 12))
    given = [here(x) for x in (some.rows, some.kv, more, torch.ones(2, 2, 12), some.whole)]
    got = triton.sampling_variance(*given, scale=some.logits["scale"], softcap=None)
    torch.testing.assert_close(got.cpu(), want, rtol=2e-4, atol=0)


@needs_gpu
def test_captured() -> None:
    some = [here(x) for x in case([300, 200], count=4, room=150).given]
    want = sampling_variance(*some, scale=0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sampling_variance(*some, scale=0.25)
    graph.replay()
    assert torch.equal(got, want)
