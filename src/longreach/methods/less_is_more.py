"""LessIsMore: all heads choose one set, with a share for recent keys (Yang et al., 2025, arXiv 2508.07101)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.methods.base import budget, check_budget, is_count, logits_bytes
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import CrossLayerTopK, gather_over_ranks, keys_for_budget, max_keys
from longreach.ops import HeadShard, Lists, Partial
from longreach.ops.types import Logits, require

PAPER = (2, 13), 32  # TidalDecode's for Llama-3-8B, which this builds on


@dataclass(frozen=True)
class LessIsMore(CrossLayerTopK):
    """A few layers attend densely and choose one set of keys for all heads; later layers attend to it.

    The set consists of the most recent keys (a share of the budget), the first keys, and others in round-robin order:
    every query head's best key, then every head's second best, and so on, up to the budget.

    k: the budget, a count of keys or a fraction of the row's context.
    recent: the share of recent keys in it (0.25 in the paper), rounded up.
    sinks: the number of first keys in it (the paper's figure has none, its code up to 4).
    layers: the choosing layers; None: TidalDecode's (2, 13) of Llama-3-8B's 32 layers (arXiv 2410.05076), at the
        same relative depth, rounded down. Good choosing layers differ from model to model: with fewer than 16
        layers the first of these is layer 0, whose attention may be flat.

    Layers before the first attend densely. Among equal ranks the lower head comes first. Heads of all ranks of a
    tensor-parallel run choose together.
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
        return keys_for_budget(call, scores[:, None], self.k)

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        votes = logits_bytes(model, rows, capacity, dtype) + 4 * rows * model.query_heads * max_keys(self.k, capacity)
        return super().workspace_bytes(model, rows, capacity, dtype) + votes

    def _share(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """The budget of each row and its number of recent keys, int64 [R] each."""
        count = budget(self.k, call.context)
        return count, count - torch.floor(count * (1.0 - self.recent) + 1e-9).long()
