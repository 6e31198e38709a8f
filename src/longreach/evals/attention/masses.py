"""Distribution of attention's weight: by place (first, last, distance) and by size (the heaviest keys)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

SINKS = 4  # first positions
WINDOWS = (64, 256)  # last keys, the row's own among them
TOPS = (16, 64, 256, 1024)  # heaviest keys
COVER = 0.95


def distances(length: int) -> list[int]:
    """Edges of bins of distance, [0, 1), [1, 2), [2, 4), [4, 8), ..., up to one that holds length - 1."""
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return edges


def by_place(share: Tensor, pos: Tensor, edges: list[int]) -> dict[str, Tensor]:
    """fp64 of weights [r, h, n], which sum to 1, of rows at positions `pos` [r].

    sinks [r, h]: on the first SINKS positions. windows [r, h, len(WINDOWS)]: on that many last keys. distance
    [r, h, bins]: on keys at that distance, those among the first SINKS left out, so that with them they make 1.
    """
    total = torch.nn.functional.pad(share.cumsum(-1, dtype=torch.float64), (1, 0))  # [.., i]: on the keys before i

    def before(key: Tensor) -> Tensor:
        at = key.clamp(0, share.shape[-1])[:, None, None].expand(*share.shape[:2], 1)
        return total.gather(-1, at)[..., 0]

    end = pos + 1
    bounds = [before((end - edge).clamp(min=SINKS)) for edge in edges]
    return {
        "sinks": before(torch.full_like(pos, SINKS)),
        "windows": torch.stack([before(end) - before(end - size) for size in WINDOWS], -1),
        "distance": torch.stack([near - far for near, far in pairwise(bounds)], -1),
    }


def by_size(share: Tensor) -> dict[str, Tensor]:
    """fp64 of weights [r, h, n], which sum to 1.

    tops [r, h, len(TOPS)]: on that many heaviest keys. cover [r, h]: how many of the heaviest hold COVER.
    """
    held = share.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    tops = [held[..., min(k, share.shape[-1]) - 1] for k in TOPS]
    cover = (held < COVER).sum(-1).clamp(max=share.shape[-1] - 1) + 1
    return {"tops": torch.stack(tops, -1), "cover": cover.double()}
