"""Kascade's definitions in plain loops, from whole matrices of attention weights."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor


def tile_shares(weights: Tensor, group: int, k: int, tokens: int) -> Tensor:
    """fp64 [L, G, L, G] of one prompt. weights: [L, H, N, N], rows queries.

    For a tile and heads (a, i) and (b, j): what (b, j) has on the k best keys of (a, i) before the tile and on the tile
    itself, over the same with its own k best keys; the least over the tiles with more than k keys before them.
    """
    layers, heads, length, _ = weights.shape
    heads //= group
    found = torch.ones(layers, heads, layers, heads, dtype=torch.float64)
    for start in range(0, length, tokens):
        if start <= k:
            continue
        stop = min(start + tokens, length)
        pooled = weights.double()[:, :, start:stop].sum(2).unflatten(1, (heads, group)).sum(2)  # [L, G, N]
        best = [[pooled[a, i, :start].argsort(descending=True)[:k] for i in range(heads)] for a in range(layers)]
        for a in range(layers):
            for b in range(a, layers):
                for i in range(heads):
                    for j in range(heads):
                        own = pooled[b, j, start:stop].sum()
                        share = (pooled[b, j, best[a][i]].sum() + own) / (pooled[b, j, best[b][j]].sum() + own)
                        found[a, i, b, j] = min(float(found[a, i, b, j]), float(share))
    return found


def best_anchors(similarity: Tensor, budget: int) -> tuple[tuple[int, ...], float]:
    """Of all sets of `budget` anchors with the first layer among them, the best; the first in order of equals."""
    layers = similarity.shape[0]
    ways = [(0, *rest) for rest in combinations(range(1, layers), budget - 1)]
    values = [worth(similarity, way) for way in ways]
    best = max(values)
    return next(way for way, value in zip(ways, values, strict=True) if value >= best - 1e-12), best


def worth(similarity: Tensor, anchors: tuple[int, ...]) -> float:
    return sum(float(similarity[max(a for a in anchors if a <= layer), layer]) for layer in range(len(similarity)))
