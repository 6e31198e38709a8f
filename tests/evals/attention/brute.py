"""The measures as their definitions say, row by row in fp64, from whole matrices of transformers' own attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

TOPS, WINDOWS, K, RECENT = (16, 64, 256, 1024), (64, 256), 256, 1024


@torch.no_grad()
def matrices(model: Any, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(weights [L, H, T, T] of the model's eager attention, queries before rotation [L, T, H, D])."""
    found: list[torch.Tensor] = []
    heads = model.config.num_attention_heads
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda m, a, out: found.append(out[0].unflatten(-1, (heads, -1))))
        for layer in model.model.layers
    ]
    out = model(torch.tensor([tokens]), output_attentions=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(out.attentions).double().numpy(), torch.stack(found).double().numpy()


def masses(weights: np.ndarray, row: int, edges: list[int]) -> dict[str, Any]:
    """Of one row's weights [T]; what is missing to 1 is the virtual sink's."""
    seen = weights[: row + 1]
    share = seen / seen.sum()
    heavy = np.sort(share)[::-1]
    back = {i: row - i for i in range(row + 1)}
    return {
        "virtual_sink": 1 - seen.sum(),
        "sinks": share[:4].sum(),
        "windows": [sum(share[i] for i, d in back.items() if d < w) for w in WINDOWS],
        "distance": [sum(share[i] for i, d in back.items() if a <= d < b and i >= 4) for a, b in pairwise(edges)],
        "tops": [heavy[:k].sum() for k in TOPS],
        "cover": next(n for n in range(1, row + 2) if heavy[:n].sum() >= 0.95),
    }  # fmt: skip


def likeness(queries: np.ndarray, row: int) -> dict[str, Any]:
    """Of one row among queries [T, D]."""
    before = queries[max(0, row - RECENT) : row]
    cosines = [q @ queries[row] / np.linalg.norm(q) / np.linalg.norm(queries[row]) for q in before]
    nearest = min(((q - queries[row]) ** 2).sum() for q in before)
    limit = [2 * queries.shape[1] * (1 - tau) ** 2 for tau in (0.45, 0.75)]
    return {"previous": cosines[-1], "best": max(cosines), "match": [float(nearest < x) for x in limit]}


def agreement(chosen: list[tuple[np.ndarray, int]], groups: int) -> dict[str, np.ndarray]:
    """chosen: weights [L, H, T, T] and a row of them, again and again; maps [L, L] over all these rows."""
    layers, heads = chosen[0][0].shape[:2]
    recall, mass = np.zeros((2, layers, groups, layers, groups))
    for weights, row in chosen:
        pooled = weights[:, :, row, : row + 1].reshape(layers, groups, heads // groups, -1).sum(2)
        sets = [[{i for i in np.argsort(-p)[:K] if p[i] > 0} for p in layer] for layer in pooled]
        for a, ha, b, hb in np.ndindex(recall.shape):
            mine, other, held = sets[b][hb], sets[a][ha], pooled[b, hb]
            recall[a, ha, b, hb] += len(mine & other) / len(mine) / len(chosen)
            mass[a, ha, b, hb] += held[list(other)].sum() / held[list(mine)].sum() / len(chosen)
    return {"recall": recall.max(1).mean(-1), "mass": mass.max(1).mean(-1)}


def retrieval(
    weights: np.ndarray, tokens: list[int], row: int, needle: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """([L, H] whether the heaviest key is the needle's and the next token, [L, H] the needle's share)."""
    seen = weights[:, :, row, : row + 1]
    top = seen.argmax(-1)
    inside = (top >= needle[0]) & (top < needle[1])
    copies = inside & (np.array(tokens)[top] == tokens[row + 1])
    return copies.astype(float), seen[..., needle[0] : needle[1]].sum(-1) / seen.sum(-1)
