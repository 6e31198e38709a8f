"""What top_k promises, by sorting Python numbers; and rows that are hard for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def brute(scores: list[float], k: int, first: int, last: int) -> list[int]:
    """The chosen columns of one row that is as long as its scores."""
    length = len(scores)
    recent = [c for c in range(length - 1, -1, -1) if c >= length - last]
    start = [c for c in range(length) if c < first and c not in recent]
    rest = [c for c in range(length) if c < length - last and c >= first]
    rest.sort(key=lambda c: (math.isnan(scores[c]), 0.0 if math.isnan(scores[c]) else -scores[c], c))
    return sorted([*recent, *start, *rest][: max(0, k)])


def held_to(
    index: Tensor, used: Tensor, x: Tensor, count: Tensor, length: Tensor, first: int = 0, last: int = 0
) -> None:
    """Every list of a result is exactly what sorting gives; lists that overflow say so."""
    lists, heads, _ = x.shape
    assert index.dtype == used.dtype == torch.int32 and used.shape == (lists, heads)
    length = length.reshape(lists, -1).expand(lists, heads)
    for li in range(lists):
        for h in range(heads):
            n, k = int(length[li, h]), int(count[li, h])
            assert int(used[li, h]) == min(max(k, 0), n), (li, h)
            if int(used[li, h]) <= index.shape[2]:
                want = brute(x[li, h, :n].tolist(), k, first, last)
                assert index[li, h, : int(used[li, h])].tolist() == want, (li, h)


def hard_rows(columns: int) -> Tensor:
    """Rows [1, 15, columns] of all kinds: smooth, heavy tails, ties, few values, infinities, NaN, denormals, order."""
    dice = torch.Generator().manual_seed(columns)
    normal = torch.randn(columns, generator=dice)
    column = torch.arange(columns)
    some = torch.rand(columns, generator=dice)
    rows = [
        normal,
        torch.exp(3 * normal),
        torch.full((columns,), 0.25),
        torch.where(some < 0.9, 0.0, normal.abs()),  # what a softmax leaves that underflows
        torch.where(some < 0.03, normal.abs(), -0.0 * normal),  # -0.0 and 0.0 are one value
        (some < 0.3).float(),
        (some * 7).floor(),
        torch.where(some < 0.1, torch.inf, torch.where(some > 0.8, -torch.inf, normal)),
        torch.where(some < 0.6, torch.nan, normal),
        normal * 1e-42,
        column.float(),
        -column.float(),
        (column % 64).float(),
        torch.where(column // 512 == 1, normal + 100, normal),  # all heavy ones in one place
        torch.full((columns,), -torch.inf),
    ]
    return torch.stack(rows)[None]
