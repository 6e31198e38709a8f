"""A trained index of blocks: few features a key, averaged over a block, compared with features of the queries.

Not in the paper, whose hash finds two thirds of what a mean key finds. Distilled from dense attention's mass per block,
as the indexers of DeepSeek's sparse attention are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longreach.mka.config import MKAConfig
from longreach.ops.recall import Pool
from longreach.ops.rope import RotaryFrequencies, angles, unrotate

HIDDEN = 64


class BlockIndex(nn.Module):
    """Features of blocks and queries of one layer, for each KV head, of keys and queries before rotation.

    A key's features are up (D -> 64, GELU) and down (64 -> F); a block has their mean. The query heads of a KV head
    together have F features, a linear map of their channels. A block's score is their dot product.
    """

    pool: Pool = "sum"

    def __init__(self, config: MKAConfig, heads: int, kv_heads: int, dim: int):
        super().__init__()
        self.block, self.features, self.kv_heads = config.block, config.features, kv_heads
        group = heads // kv_heads
        self.up = nn.Parameter(torch.randn(kv_heads, dim, HIDDEN) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(kv_heads, HIDDEN, config.features) * HIDDEN**-0.5)
        self.query = nn.Parameter(torch.randn(kv_heads, group * dim, config.features) * 0.4 * (group * dim) ** -0.5)

    def rotated(self, frequencies: RotaryFrequencies, first: int = 0) -> IndexCode:
        """The index of rotated keys and queries. first: KV head that this rank's heads begin with."""
        return IndexCode(self, frequencies, first)

    def of_keys(self, k: Tensor, first: int = 0) -> Tensor:
        """Features of keys before rotation: [..., G, n, D] -> [..., G, n, F]."""
        heads = slice(first, first + k.shape[-3])
        hidden = F.gelu(k @ self.up[heads].to(k.dtype))
        return hidden @ self.down[heads].to(k.dtype)

    def of_queries(self, q: Tensor, kv_heads: int, first: int = 0) -> Tensor:
        """Features of queries before rotation: [R, H, D] -> [R, G, F]."""
        grouped = q.unflatten(1, (kv_heads, -1)).flatten(2)
        return torch.einsum("rgx,gxf->rgf", grouped, self.query[first : first + kv_heads].to(q.dtype))


@dataclass(frozen=True)
class IndexCode:
    """A BlockIndex over keys after rotation, in the place of `ops.recall.BlockCode`."""

    index: BlockIndex
    frequencies: RotaryFrequencies
    first: int = 0

    @property
    def pool(self) -> Pool:
        return self.index.pool

    def width(self, dim: int) -> int:
        """Numbers of a block's code."""
        return self.index.features

    def of_blocks(self, k: Tensor, first: Tensor) -> Tensor:
        """Codes of complete blocks. k: [P, G, n, B, D] rotated; first: int, positions of the blocks' first keys,
        broadcast against [P, G, n]. Returns [P, G, n, F]."""
        pos = first[..., None] + torch.arange(k.shape[-2], device=k.device)
        cos, sin = angles(pos.expand(k.shape[:-1]), self.frequencies.inv_freq)
        raw = unrotate(k, cos, sin, layout=self.frequencies.layout)
        flat = raw.flatten(-3, -2)
        return self.index.of_keys(flat, self.first).unflatten(-2, k.shape[-3:-1]).mean(-2)

    def of_rows(self, q: Tensor, pos: Tensor) -> Tensor:
        """Codes of rows: q [R, H, D] rotated, pos [R] -> [R, G, F]."""
        cos, sin = angles(pos, self.frequencies.inv_freq)
        raw = unrotate(q, cos[:, None], sin[:, None], layout=self.frequencies.layout)
        kv_heads = q.shape[1] // (self.index.query.shape[1] // q.shape[2])
        return self.index.of_queries(raw, kv_heads, self.first)
