"""Oracle top-k: exact scores first, then attention over the best keys. An upper bound, for evaluation only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod, LayerCall, Outcome, Reads, attend_densely, budget, check_budget
from longreach.ops import Lists, Spans, pooled_scores
from longreach.ops.types import require


@dataclass(frozen=True)
class OracleTopK(AttentionMethod):
    """The k keys with the largest post-softmax scores, summed over the query heads of a KV head.

    k: a count, or a fraction of the row's context. dense_layers: layers that attend densely ((0,) changes
    the result: Kascade, Fig. 2). heads: "kv" chooses per KV head, "all" one set for all heads (over all ranks).
    It reads all keys twice to score them, so it costs more than dense: it shows quality, not speed.
    """

    k: int | float = 0.1
    dense_layers: tuple[int, ...] = ()
    heads: str = "kv"

    name = "oracle_top_k"
    phases = ("decode",)

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        require(self.heads in ("kv", "all"), f"heads: expected 'kv' or 'all', got {self.heads!r}")
        ok = isinstance(self.dense_layers, tuple) and all(isinstance(n, int) and n >= 0 for n in self.dense_layers)
        require(ok, f"dense_layers: expected a tuple of layer numbers, got {self.dense_layers!r}")

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.layer in self.dense_layers:
            return attend_densely(call, "in dense_layers")
        scores = pooled_scores(call.rows, call.kv, scale=call.scale, softcap=call.softcap, impl=call.impl)
        if self.heads == "all":
            scores = call.sum_over_ranks(scores.sum(1, keepdim=True))
        seen = torch.minimum(call.rows.pos.long() + 1, call.kv.filled[call.rows.seq])
        count = budget(self.k, seen)[:, None].expand(-1, scores.shape[1])
        most = call.kv.capacity if isinstance(self.k, float) else min(self.k, call.kv.capacity)
        if isinstance(self.k, float):
            most = min(most, int(self.k * call.kv.capacity) + 1)
        unseen = torch.arange(scores.shape[2], device=scores.device) >= seen[:, None, None]
        # a stable sort: ties go to the older key, whatever the capacity
        order = scores.masked_fill(unseen, -1.0).sort(dim=-1, descending=True, stable=True).indices[..., :most]
        chosen = Lists(order, count)
        everything = Spans.dense()
        return Outcome(call.attend(chosen), Reads((everything, everything, chosen), (chosen,)))
