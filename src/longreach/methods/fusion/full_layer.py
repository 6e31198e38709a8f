"""Fusion that computes all tokens up to the second layer and chooses there: CacheBlend and A3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longreach.methods.fusion.base import best, check_ratio
from longreach.methods.fusion.scores import attention_by_head, attention_of_all_heads
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops.doors import Read
from longreach.ops.types import require


@dataclass(frozen=True)
class CacheBlend(Fusion):
    """Recompute where stored values are furthest from the second layer's own (arXiv 2405.16444).

    The distance is squared L2 over all KV heads.

    ratio: of the whole prompt's tokens.
    """

    ratio: float = 0.15

    name = "cacheblend"
    full_layers = 1
    compares_values = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        assert layer is not None
        own, stored = layer.values[prompt.at], layer.stored_values()
        layer.call.count_read(Read(value_bytes=own.element_size(), counted=own.numel() + stored.numel()))
        moved = own.float() - stored  # in fp32
        scores = moved.new_zeros(len(prompt.stored))
        scores[prompt.at] = torch.linalg.vector_norm(moved, dim=(1, 2)).square()
        return best(layer.call.sum_over_ranks(scores), prompt, self.ratio)


@dataclass(frozen=True)
class A3(Fusion):
    """Recompute the tokens that the question attends to most in the second layer (arXiv 2511.17560, Eq. 3).

    ratio: of the whole prompt's tokens.
    heads: "each", a softmax for each query head, summed; "joint", one softmax of the logits summed over heads, over
        sqrt(H D), without what stands before the first chunk, and the mean of 5 neighbours: how the authors'
        released code reads Eq. 3.
    """

    ratio: float = 0.15
    heads: Literal["each", "joint"] = "each"

    name = "a3"
    full_layers = 1

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        require(self.heads in ("each", "joint"), f"heads: expected 'each' or 'joint', got {self.heads!r}")

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        assert layer is not None
        scores = (attention_by_head if self.heads == "each" else attention_of_all_heads)(prompt, layer.call)
        return best(scores, prompt, self.ratio)
