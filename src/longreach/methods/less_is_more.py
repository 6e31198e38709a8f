"""LessIsMore: heads choose together, and recent keys have a share (Yang et al., 2025, arXiv 2508.07101)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.methods.base import budget, check_budget, is_count, logits_bytes
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import CrossLayerTopK, best_keys, gather_over_ranks, max_keys
from longreach.ops import HeadShard, Lists, Partial
from longreach.ops.types import Logits, require

PAPER = (2, 13), 32  # TidalDecode's for Llama-3-8B, which this builds on


@dataclass(frozen=True)
class LessIsMore(CrossLayerTopK):
    """A few layers attend densely and choose, one set for all heads, what the layers after them attend to.

    The set: the most recent keys (a share of the budget), the first ones, and the union of what the query heads score
    highest among the others, taken rank by rank (every head's best, then every head's second, ...) up to the budget.

    k: the budget, a count of keys or a fraction of the row's context. recent: the share of it that the most recent keys
    have (0.25 in the paper), rounded up. sinks: the first keys, within the budget (its figure has none, its code up to
    4). layers: those that choose; None: (2, 13) of 32, TidalDecode's for Llama-3-8B (arXiv 2410.05076), as deep in this
    model, rounded down; which layers choose well is a model's own affair: with fewer than 16 layers the first of these
    is layer 0, which has no dense layer before it and may look at everything. Those before the first attend densely.
    Within a rank the lower head comes first. Heads of all ranks of a tensor-parallel run choose together.
    """

    k: int | float = 0.1
    recent: float = 0.25
    sinks: int = 4

    name = "less_is_more"
    phases = ("decode",)
    paper = PAPER

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("k", self.k)
        share = isinstance(self.recent, float) and 0.0 < self.recent <= 1.0
        require(share, f"recent: expected a share of the budget, a float in (0, 1], got {self.recent!r}")
        require(is_count(self.sinks), f"sinks: expected a count, got {self.sinks!r}")

    def select_keys(self, call: LayerCall, whole: Partial, logits: Logits) -> Lists:
        shard, group = call.shard or HeadShard.whole(call.kv.heads), call.rows.q.shape[1] // call.kv.heads
        count, recent = call.once((self, "share"), lambda: self._share(call))
        most = max_keys(self.k, call.kv.capacity)
        ballot = call.op("spread_logits", logits, count, recent, first=self.sinks, most=most)
        index, used = call.op("top_k", ballot.logits, ballot.depth, call.context, capacity=most)
        first, heads = shard.first * group, shard.total * group
        scores = gather_over_ranks(
            call, call.op("rank_round_robin", ballot, index, used, first_head=first, heads=heads)
        ).amax(1)
        return best_keys(call, scores[:, None], self.k)

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        votes = logits_bytes(model, rows, capacity, dtype) + 4 * rows * model.query_heads * max_keys(self.k, capacity)
        return super().workspace_bytes(model, rows, capacity, dtype) + votes

    def _share(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """The budget of each row and how many of it the most recent keys have, int64 [R] each."""
        count = budget(self.k, call.context)
        return count, count - torch.floor(count * (1.0 - self.recent) + 1e-9).long()
