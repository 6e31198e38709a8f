"""One attention layer of each variant, run over whole sequences and token by token, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from longreach.mka.block import Blocks, Reach, Recalled, attend_recalled, block_attention, choose
from longreach.mka.config import MKAConfig
from longreach.mka.fast import FastMemory, fuse
from longreach.mka.full import combine
from longreach.mka.layout import Layout
from longreach.mka.levels import Levels
from longreach.mka.session import session
from longreach.mka.tokens import Tokens
from longreach.ops import KVView, Rows, ScanCarry, Span, Spans, absolute, angles, attend, relative, rotate
from longreach.ops.rope import RotaryFrequencies

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 24
SCALE = DIM**-0.5
FREQUENCIES = RotaryFrequencies(100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")


def turned(x: Tensor, pos: Tensor) -> Tensor:
    """x [R, heads, D] rotated to positions pos [R]."""
    cos, sin = angles(pos, FREQUENCIES.inv_freq)
    return rotate(x, cos[:, None], sin[:, None])


class Layer(nn.Module):
    """Projections and Levels; forward attends over whole sequences."""

    def __init__(self, config: MKAConfig, gate: float = 0.7, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.levels = Levels(config, 0, HEADS, KV_HEADS, DIM, gate)
        with torch.no_grad():
            for name, p in self.levels.router.named_parameters():
                if "gate" not in name:
                    p.add_(0.5 * torch.randn_like(p))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.q(x).unflatten(-1, (HEADS, DIM)),
            self.k(x).unflatten(-1, (KV_HEADS, DIM)),
            self.v(x).unflatten(-1, (KV_HEADS, DIM)),
        )

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [R, WIDTH] -> [R, H, D]."""
        config, pos, layout = self.config, tokens.pos, Layout.of(tokens, self.config.block)
        q, k, v = self.project(x)
        units = -(-tokens.longest // config.block)
        if config.variant == "fastmka":
            memory = FastMemory.empty(config, tokens.sequences, units, KV_HEADS, DIM, q.dtype, q.device)
            k, v, _, _ = fuse(self.levels, q, k, v, tokens.seq, pos, tokens.counts, memory, scale=SCALE)
            rows = layout.rows(turned(q, pos))
            return attend(rows, layout.view(turned(k, pos), v), _dense(layout.start), scale=SCALE).out
        rows, kv = layout.rows(turned(q, pos)), layout.view(turned(k, pos), v)
        code = self.levels.code(FREQUENCIES)
        reach = Reach.of(layout.slot, layout.start, config)
        blocks = Blocks.of(kv, layout.first, code, FREQUENCIES, config.block, summaries=2 in config.tiers)
        weights = self.levels.router(q, reach.has_blocks)
        recalled = choose(rows, pos, KV_HEADS, blocks, reach, code, config, SCALE) if 3 in config.tiers else None
        if config.variant == "block_mka":
            return block_attention(rows, kv, reach, blocks, recalled, weights, config, SCALE).out
        sets = [attend(rows, kv, _dense(layout.start), scale=SCALE)]
        if 2 in config.tiers:
            carry = ScanCarry.empty(tokens.sequences, KV_HEADS, 2 * DIM, dtype=q.dtype)
            k2, v2, _ = session(k, v, self.levels.rate(), tokens.seq, pos, carry)
            sets.append(attend(rows, layout.view(turned(k2, pos), v2), _dense(layout.start), scale=SCALE))
        if recalled is not None:
            sets.append(attend_recalled(rows, kv, recalled, config.block, SCALE))
        return combine(sets, weights, config.mode)


def _dense(start: Tensor | None) -> Spans:
    return Spans.dense() if start is None else Spans((Span(absolute(start[:, None]), relative(1)),))


@dataclass
class Decoding:
    """A layer read in passes, with explicit state: keys, values, session carry, sums of blocks."""

    layer: Layer
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
        """The next counts[b] tokens of each sequence, x [sum(counts), WIDTH] in its order -> [R, H, D]."""
        layer, config = self.layer, self.layer.config
        seq = torch.repeat_interleave(torch.arange(self.batch), torch.tensor(counts))
        pos = torch.cat([torch.arange(n, n + c) for n, c in zip(self.lengths, counts, strict=True)])
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        lens = torch.tensor(self.lengths)
        q, k, v = layer.project(x)
        if config.variant == "fastmka":
            k, v, self.memory, _ = fuse(layer.levels, q, k, v, seq, pos, counts, self.memory, scale=SCALE)
        self.k[seq, :, pos], self.v[seq, :, pos] = turned(k, pos), v
        rows, kv = Rows(turned(q, pos), seq, pos), KVView(self.k, self.v, lens)
        if config.variant == "fastmka":
            return attend(rows, kv, Spans.dense(), scale=SCALE).out
        code = layer.levels.code(FREQUENCIES)
        reach = Reach.of(pos, None, config)
        blocks = self._blocks(kv, code, summaries=2 in config.tiers)
        weights = layer.levels.router(q, reach.has_blocks)
        recalled: Recalled | None = None
        if 3 in config.tiers:
            recalled = choose(rows, pos, KV_HEADS, blocks, reach, code, config, SCALE)
        if config.variant == "block_mka":
            return block_attention(rows, kv, reach, blocks, recalled, weights, config, SCALE).out
        sets = [attend(rows, kv, Spans.dense(), scale=SCALE)]
        if 2 in config.tiers:
            assert self.memory.carry is not None
            k2, v2, carry = session(k, v, layer.levels.rate(), seq, pos, self.memory.carry)
            self.memory = FastMemory(carry, self.memory.sums)
            self.k2[seq, :, pos], self.v2[seq, :, pos] = turned(k2, pos), v2
            sets.append(attend(rows, KVView(self.k2, self.v2, lens), Spans.dense(), scale=SCALE))
        if recalled is not None:
            sets.append(attend_recalled(rows, kv, recalled, config.block, SCALE))
        return combine(sets, weights, config.mode)

    def _blocks(self, kv: KVView, code: object, *, summaries: bool) -> Blocks:
        """Blocks of all slots; those that hold unwritten ones are NaN, and nobody may read them."""
        units = self.capacity // self.layer.config.block
        first = torch.arange(units)[None].expand(self.batch, -1) * self.layer.config.block
        return Blocks.of(kv, first, code, FREQUENCIES, self.layer.config.block, summaries=summaries)  # type: ignore[arg-type]
