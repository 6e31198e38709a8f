"""Oracle top-k: exact scores first, then attention over the best keys. An upper bound, for evaluation only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import Unsupported
from longreach.methods.base import (
    AttentionMethod,
    LayerCall,
    ModelShape,
    Outcome,
    Reads,
    attend_densely,
    budget,
    check_budget,
    is_count,
)
from longreach.methods.choosing import most
from longreach.ops import Lists, Spans
from longreach.ops.selection import visible
from longreach.ops.types import require

EVERYTHING = Spans.dense()


@dataclass(frozen=True)
class OracleTopK(AttentionMethod):
    """The k keys with the largest post-softmax scores, summed over the query heads of a KV head.

    k: a count, or a fraction of the row's context. dense_layers: layers that attend densely ((0,) changes
    the result: Kascade, Fig. 2). heads: "kv" chooses per KV head, "all" one set for all heads (over all ranks).
    Ties go to the older key. It reads all keys twice to score them (once for the softmax's normaliser, once for
    the scores; an implementation that holds all logits saves the second), then the list it made, so it costs more
    than dense: it shows quality, not speed. Where a sink logit takes probability, the normaliser is dense
    attention's, values included. Its score rows and their sort are not counted (see `Reads`).
    """

    k: int | float = 0.1
    dense_layers: tuple[int, ...] = ()
    heads: Literal["kv", "all"] = "kv"

    name = "oracle_top_k"
    phases = ("decode",)
    capture = "piecewise"  # it shows quality: nothing is gained by a captured step

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        require(self.heads in ("kv", "all"), f"heads: expected 'kv' or 'all', got {self.heads!r}")
        ok = isinstance(self.dense_layers, tuple) and all(is_count(n) for n in self.dense_layers)
        require(ok, f"dense_layers: expected a tuple of layer numbers, got {self.dense_layers!r}")

    def check(self, model: ModelShape) -> None:
        for layer in self.dense_layers:
            require(
                layer < model.layers,
                f"dense_layers: expected layers of the model, which has {model.layers} (0 to {model.layers - 1}), "
                f"got layer {layer}",
            )

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.layer in self.dense_layers:
            return attend_densely(call, "in dense_layers")
        scores, reads = self._scores(call)
        if self.heads == "all":
            if call.kv.slot_pos is not None:
                raise Unsupported("heads='all': after eviction a slot holds another key in each head; use heads='kv'")
            scores = call.sum_over_ranks(scores.sum(1, keepdim=True))
        seen = visible(call.rows, call.kv, call.kv.capacity, "kv")  # [R, 1 or G, N]
        visible_slots, capacity = seen.sum(-1), call.kv.capacity
        count = budget(self.k, visible_slots).expand(-1, scores.shape[1]).contiguous()
        if call.kv.slot_pos is None:
            length = visible_slots[:, 0]
        else:  # what a row sees is no first part of the slots
            length = torch.full_like(call.rows.pos, capacity)
            scores = scores.nan_to_num(torch.inf).masked_fill(~seen, -1.0)
        chosen = Lists(*call.top_k(scores.float(), count, length, capacity=most(self.k, capacity)))
        return Outcome(call.attend(chosen), Reads((*reads.keys, chosen), (*reads.values, chosen)))

    def _scores(self, call: LayerCall) -> tuple[Tensor, Reads]:
        """fp32 [R, G, N], and what was read for them."""
        if call.sink_logit is None:
            return call.pooled_scores(), Reads((EVERYTHING, EVERYTHING), ())
        lse = call.attend(EVERYTHING).lse
        return call.pooled_scores(lse), Reads((EVERYTHING, EVERYTHING), (EVERYTHING,))
