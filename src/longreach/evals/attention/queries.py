"""Similarity of queries before rotation to recent ones, which MAC-Attention's matching relies on."""

from __future__ import annotations

import torch
from torch import Tensor

RECENT = 1024  # queries that are looked back at; MAC-Attention's default
TAUS = (0.45, 0.75)  # its defaults for long prompts and for long generation
MOST = 1 << 24  # products of queries in memory at a time


class RecentQueries:
    """The last RECENT queries of each layer [<= RECENT, H, D], as passes over one sequence bring them."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def extend(self, layer: int, q: Tensor) -> tuple[Tensor, int]:
        """(kept queries and the new ones q [T, H, D], how many were kept); then the last RECENT are kept."""
        kept = self._kept.get(layer, q[:0])
        joined = torch.cat([kept, q])
        self._kept[layer] = joined[-RECENT:].clone()
        return joined, len(kept)


def likeness(queries: Tensor, index: Tensor) -> dict[str, Tensor]:
    """Of the queries at `index` [r] >= 1 among `queries` [T, H, D], which lie side by side, to those before them.

    previous [r, H]: cosine similarity to the one before. best [r, H]: the highest to one of the RECENT before.
    match [r, H, len(TAUS)]: 1 where MAC-Attention would reuse the nearest of these: |q - q'|^2 < 2 D (1 - tau)^2.
    """
    step = max(1, MOST // (queries.shape[0] * queries.shape[1]))
    parts = [_likeness(queries, part) for part in index.split(step)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _likeness(queries: Tensor, index: Tensor) -> dict[str, Tensor]:
    everything = queries.float()
    size = everything.norm(dim=-1)  # [T, H]
    mine, my_size = everything[index], size[index]
    products = torch.einsum("rhd,thd->rht", mine, everything)
    cosine = products / (my_size[:, :, None] * size.T[None]).clamp(min=1e-30)
    place = torch.arange(len(queries), device=index.device)
    recent = (place < index[:, None]) & (place >= index[:, None] - RECENT)  # [r, T]
    apart = my_size[:, :, None] ** 2 + size.T[None] ** 2 - 2 * products
    nearest = apart.masked_fill(~recent[:, None], torch.inf).amin(-1)
    before = (index - 1)[:, None, None].expand(-1, queries.shape[1], 1)
    limits = [2 * queries.shape[2] * (1 - tau) ** 2 for tau in TAUS]
    return {
        "previous": cosine.gather(-1, before)[..., 0],
        "best": cosine.masked_fill(~recent[:, None], -torch.inf).amax(-1),
        "match": torch.stack([nearest < limit for limit in limits], -1).float(),
    }
