"""Fusion that chooses by what the second layer makes of all tokens: CacheBlend and A3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.methods.fusion.base import FullLayer, Fusion, PromptParts, best, check_ratio
from longreach.ops import Rows
from longreach.ops.types import require

ROWS = 64  # of the question, scored at a time: [ROWS, G, N] scores are held


@dataclass(frozen=True)
class CacheBlend(Fusion):
    """Recompute where stored values are furthest from the second layer's own (arXiv 2405.16444).

    The distance is squared L2 over all KV heads. ratio: of the whole prompt's tokens.
    """

    ratio: float = 0.15

    name = "cacheblend"
    full_layers = 1

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def choose(self, prompt: PromptParts, layer: FullLayer | None) -> Tensor:
        assert layer is not None
        moved = (layer.values[prompt.stored].float() - layer.stored_values().float()).square().sum((1, 2))
        scores = moved.new_zeros(len(prompt.stored)).masked_scatter(prompt.stored, moved)
        return best(layer.call.sum_over_ranks(scores), prompt, self.ratio)


@dataclass(frozen=True)
class A3(Fusion):
    """Recompute the tokens that the question attends to most in the second layer (arXiv 2511.17560, Eq. 3).

    ratio: of the whole prompt's tokens. heads: "each", a softmax for each query head, summed; "joint", one softmax of
    the logits summed over heads, over sqrt(H D), without what stands before the first chunk, and the mean of 5
    neighbours: how the authors' released code reads Eq. 3.
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
        scores = self._each(layer) if self.heads == "each" else self._joint(prompt, layer)
        return best(scores, prompt, self.ratio)

    def _each(self, layer: FullLayer) -> Tensor:
        """float [N]: probabilities summed over the question's rows and the query heads of all ranks."""
        call, count = layer.call, len(layer.values)
        total = torch.zeros(count, dtype=torch.float32, device=layer.values.device)
        columns = torch.arange(count, device=total.device)
        for index in torch.arange(len(call.rows.pos), device=total.device).split(ROWS):
            some = call.take(index)
            lse, logits = some.op("score_keys")
            pooled = some.op("pooled_scores", lse=lse, logits=logits)[..., :count]
            seen = columns <= some.rows.pos[:, None, None]  # what lies past a row may be anything
            total += torch.where(seen, pooled, 0.0).sum((0, 1))
        return call.sum_over_ranks(total)

    def _joint(self, prompt: PromptParts, layer: FullLayer) -> Tensor:
        call, count = layer.call, len(layer.values)
        rows, group = call.rows, call.rows.q.shape[1] // call.kv.heads
        # heads' logits add up to one product: the query heads of a KV head are summed before it
        q = rows.q.float().unflatten(1, (call.kv.heads, group)).sum(2).flatten(1)
        shard = call.shard
        heads = rows.q.shape[1] if shard is None else group * shard.total
        keys = _keys(call.kv, rows, count).float().flatten(1)
        logits = call.sum_over_ranks(q @ keys.T) * (heads * rows.q.shape[2]) ** -0.5
        first = int(prompt.stored.int().argmax())
        columns = torch.arange(count, device=logits.device)
        logits = logits.masked_fill((columns > rows.pos[:, None]) | (columns < first), -torch.inf)
        scores = logits.softmax(-1).sum(0)
        return F.avg_pool1d(scores[None, None], 5, stride=1, padding=2, count_include_pad=False)[0, 0]


def _keys(kv: object, rows: Rows, count: int) -> Tensor:
    """[N, G, D]: the first `count` keys of the only sequence, in the order of slots."""
    slots = torch.arange(count, device=rows.q.device)
    page, offset = kv.locate(torch.zeros_like(slots), slots)  # type: ignore[attr-defined]
    return kv.k[page, :, offset]  # type: ignore[attr-defined, no-any-return]
