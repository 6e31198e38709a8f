"""The trained part of one layer: router, gates, decay, and what recall needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longreach.mka.config import EDGE, MKAConfig
from longreach.mka.index import BlockIndex, IndexCode
from longreach.mka.router import Router, Vector
from longreach.ops.recall import BlockCode, planes_of
from longreach.ops.rope import RotaryFrequencies

LONGEST = 1024  # tokens, half-life of the head that remembers longest at first


class Levels(nn.Module):
    """Parameters of MKA in one layer, besides the model's own projections.

    router: weights of the levels. decay: logits of the session level's decay, one for each KV head. planes: random
    projections of recall="hash", [D, bits] with bf16 values, saved with the weights. index: of recall="index".
    """

    planes: Tensor

    def __init__(self, config: MKAConfig, layer: int, heads: int, kv_heads: int, dim: int, gate: float = 1.0):
        """heads, kv_heads, dim: of all ranks. gate: first value of every gate."""
        super().__init__()
        self.config, self.layer, self.kv_heads = config, layer, kv_heads
        self.router = Router(config, heads, dim, gate)
        if config.keeps_means and config.summary == "ema":
            self.decay = Vector(first_decay(config.decay, kv_heads))
        if 3 in config.tiers and config.recalls(layer):
            if config.recall == "hash":
                self.register_buffer("planes", planes_of(dim, config.bits, config.seed))
            if config.recall == "index":
                self.index = BlockIndex(config, heads, kv_heads, dim)

    def rate(self, first: int = 0, count: int | None = None) -> Tensor | None:
        """Decay of KV heads [first, first + count) of the session level, fp32 [G], or None for the mean of all."""
        logits = self.decay_logits(first, count)
        if logits is None:
            return None
        return torch.sigmoid(logits.clamp(-EDGE, EDGE).to(torch.promote_types(logits.dtype, torch.float32)))

    def decay_logits(self, first: int = 0, count: int | None = None) -> Tensor | None:
        """The logits of `rate`, as they are trained: `rate` cuts them to [-EDGE, EDGE]."""
        if self.config.summary == "mean":
            return None
        return self.decay.bias.narrow(0, first, self.kv_heads if count is None else count)

    def code(self, frequencies: RotaryFrequencies, first: int = 0) -> BlockCode | IndexCode:
        """How blocks and queries are compared in this layer. first: KV head that this rank's heads begin with."""
        if self.config.recall == "index":
            return self.index.rotated(frequencies, first)
        planes = self.planes if self.config.recall == "hash" else None
        return BlockCode(self.config.recall, frequencies, planes)


def first_decay(decay: float | None, heads: int) -> Tensor:
    """Logits of the first decays: one for all heads, or half-lives from 1 to LONGEST tokens, spread geometrically."""
    if decay is not None:
        return torch.full((heads,), math.log(decay / (1 - decay)))
    half_life = LONGEST ** torch.linspace(0, 1, heads) if heads > 1 else torch.tensor([math.sqrt(LONGEST)])
    return torch.logit(2.0 ** (-1 / half_life.double())).float()
