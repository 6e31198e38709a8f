"""LessIsMore: heads choose together, and recent keys have a share (Yang et al., 2025, arXiv 2508.07101)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.methods.base import budget, check_budget, is_count
from longreach.methods.call import LayerCall
from longreach.methods.choosing import CrossLayerTopK, best_keys, gather_over_ranks
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
        context = call.context[:, None]  # [R, 1]
        count = budget(self.k, context)
        recent = count - torch.floor(count * (1.0 - self.recent) + 1e-9).long()
        slot = torch.arange(call.kv.capacity, device=context.device)
        late, first = slot >= context - recent, slot < self.sinks
        x = logits.natural(call.kv.capacity).transpose(2, 3).flatten(1, 2)  # [R, H, N]
        x = x.masked_fill((late | first)[:, None], -torch.inf)
        turn = gather_over_ranks(call, turns(x, call.shard or HeadShard.whole(call.kv.heads), call.kv.heads)).amin(1)
        # recent keys first of all, then the first ones, in which late ones have no part
        scores = (-turn.float()).masked_fill(first, 1.0).masked_fill(late, 2.0)
        return best_keys(call, scores[:, None], self.k)


def turns(x: Tensor, shard: HeadShard, kv_heads: int) -> Tensor:
    """When each key has its turn where heads name keys by turns, each its best one next: int64 [R, N].

    x: logits [R, H, N]; turn = rank in a head times all heads, plus the head's number over all ranks, and the least of
    that over the heads. What ties go to: the older key.
    """
    heads, group = x.shape[1], x.shape[1] // kv_heads
    order = x.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(2, order, torch.arange(x.shape[2], device=x.device).expand_as(order))
    head = torch.arange(heads, device=x.device) + shard.first * group
    return (rank * (shard.total * group) + head[:, None]).amin(1)
