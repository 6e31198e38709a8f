"""An attention layer of each variant, and its decoding over ragged sequences with explicit state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longreach.mka.block import Blocks, Reach, Recalled, block_attention, choose, recalled_keys
from longreach.mka.config import MKAConfig
from longreach.mka.fast import FastMemory, fuse
from longreach.mka.full import combine
from longreach.mka.module import AttentionShape, MemoryAttention
from longreach.mka.session import session
from longreach.ops import KVView, Rows, Spans, angles, attend, rotate

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 24
SCALE = DIM**-0.5
SHAPE = AttentionShape(WIDTH, HEADS, KV_HEADS, DIM, theta=100.0)
FREQUENCIES = SHAPE.frequencies


def turned(x: Tensor, pos: Tensor) -> Tensor:
    """x [R, heads, D] rotated to positions pos [R]."""
    cos, sin = angles(pos, FREQUENCIES.inv_freq)
    return rotate(x, cos[:, None], sin[:, None])


def layer_of(config: MKAConfig, gate: float = 0.7, seed: int = 0) -> MemoryAttention:
    """A layer in fp64 whose router is far from uniform."""
    torch.manual_seed(seed)
    layer = MemoryAttention(SHAPE, config, gate=gate).double()
    with torch.no_grad():
        for name, p in layer.mka.router.named_parameters():
            if "gate" not in name:
                p.add_(0.5 * torch.randn_like(p))
    return layer


@dataclass
class Decoding:
    """A layer read in passes, with explicit state: keys, values, session carry, sums of blocks."""

    layer: MemoryAttention
    batch: int
    capacity: int
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.layer.config
        self.lengths = [0] * self.batch
        self.k, self.v, self.k2, self.v2 = (
            torch.full((self.batch, KV_HEADS, self.capacity, DIM), torch.nan, dtype=torch.float64) for _ in range(4)
        )
        units = -(-self.capacity // config.block)
        self.memory = FastMemory.empty(config, self.batch, units, KV_HEADS, DIM, torch.float64, "cpu")

    @torch.no_grad()
    def read(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The next counts[b] tokens of each sequence, x [sum(counts), WIDTH] in its order -> [R, WIDTH]."""
        layer = self.layer
        seq = torch.repeat_interleave(torch.arange(self.batch), torch.tensor(counts))
        pos = torch.cat([torch.arange(n, n + c) for n, c in zip(self.lengths, counts, strict=True)])
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        lens = torch.tensor(self.lengths)
        q, k, v = (projection(x).unflatten(-1, (-1, DIM)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
        return layer.o_proj(self._attended(q, k, v, seq, pos, counts, lens).flatten(1))

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Tensor, pos: Tensor, counts: Sequence[int], lens: Tensor
    ) -> Tensor:
        layer, config = self.layer, self.layer.config
        if config.variant == "fastmka":
            k, v, self.memory, _ = fuse(layer.mka, q, k, v, seq, pos, counts, self.memory, scale=SCALE)
        self.k[seq, :, pos], self.v[seq, :, pos] = turned(k, pos), v
        rows, kv = Rows(turned(q, pos), seq, pos), KVView(self.k, self.v, lens)
        if config.variant == "fastmka":
            return attend(rows, kv, Spans.dense(), scale=SCALE).out
        code = layer.mka.code(FREQUENCIES)
        reach = Reach.of(pos, None, config)
        blocks = self._blocks(kv, code, summaries=2 in config.tiers)
        weights = layer.mka.router(q, reach.has_blocks)
        recalled: Recalled | None = None
        if 3 in config.tiers:
            recalled = choose(rows, pos, KV_HEADS, blocks, reach, code, config, SCALE)
        if config.variant == "block_mka":
            return block_attention(rows, kv, reach, blocks, recalled, weights, config, SCALE).out
        sets = [attend(rows, kv, Spans.dense(), scale=SCALE)]
        if 2 in config.tiers:
            assert self.memory.carry is not None
            k2, v2, carry = session(k, v, layer.mka.rate(), seq, pos, self.memory.carry)
            self.memory = FastMemory(carry, self.memory.sums)
            self.k2[seq, :, pos], self.v2[seq, :, pos] = turned(k2, pos), v2
            sets.append(attend(rows, KVView(self.k2, self.v2, lens), Spans.dense(), scale=SCALE))
        if recalled is not None:
            sets.append(attend(*recalled_keys(rows, kv, recalled, config.block), scale=SCALE))
        return combine(sets, weights, config.mode)

    def _blocks(self, kv: KVView, code: object, *, summaries: bool) -> Blocks:
        """Blocks of all slots; those that hold unwritten ones are NaN, and nobody may read them."""
        units = self.capacity // self.layer.config.block
        first = torch.arange(units)[None].expand(self.batch, -1) * self.layer.config.block
        return Blocks.of(kv, first, code, FREQUENCIES, self.layer.config.block, summaries=summaries)  # type: ignore[arg-type]
