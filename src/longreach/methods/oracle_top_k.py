"""Oracle top-k: exact scores first, then attention over the best keys. An upper bound, for evaluation only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longreach.cache import SequenceState
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, check_budget, is_count, logits_bytes
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import (
    OTHER_KEYS,
    Choose,
    check_choice,
    check_layers_of,
    exact_scores,
    keys_for_budget,
    max_keys,
    sampling_bytes,
)
from longreach.methods.error_bars import check_error_bars, outcome, redo_bytes
from longreach.ops.types import require


@dataclass(frozen=True)
class OracleTopK(AttentionMethod):
    """Attention to the k keys with the largest post-softmax scores, summed over the query heads of a KV head.

    k: a count, or a fraction of the row's context.
    dense_layers: layers that attend densely ((0,) changes the result: Kascade, Fig. 2).
    heads: "kv" chooses per KV head, "all" one set for all heads of all ranks. Ties go to the older key.
    choose: "top", or "sample": keys are drawn by their scores and weighted (`choosing.chosen_keys`).
    seed: of the draw.
    error_bars: with choose="sample": the report gives the standard error of the output (`methods.error_bars`), at
        the cost of reading the sampled keys and values twice.
    redo: rows whose relative error exceeds this attend densely; it includes error_bars.

    It costs more than dense attention and shows quality, not speed. Two passes over all keys are counted (for the
    softmax's normaliser and for the scores; an implementation that keeps the logits saves the second), then the
    chosen keys. With a sink logit the normaliser comes from dense attention, values included. Scores and their sort
    are not counted, as in every report.
    """

    k: int | float = 0.1
    dense_layers: tuple[int, ...] = ()
    heads: Literal["kv", "all"] = "kv"
    choose: Choose = "top"
    seed: int = 0
    error_bars: bool = False
    redo: float | None = None

    name = "oracle_top_k"
    phases = ("decode",)
    capture = "piecewise"  # it is for evaluation: a full graph would gain nothing

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        require(self.heads in ("kv", "all"), f"heads: expected 'kv' or 'all', got {self.heads!r}")
        check_choice(self.choose, self.seed)
        check_error_bars(self.error_bars, self.redo, sampled=self.choose == "sample")
        ok = isinstance(self.dense_layers, tuple) and all(is_count(n) for n in self.dense_layers)
        require(ok, f"dense_layers: expected a tuple of layer numbers, got {self.dense_layers!r}")

    @property
    def reads_follow_lengths(self) -> bool:  # type: ignore[override]  # how many rows are redone depends on keys
        return self.redo is None

    def check(self, model: ModelShape) -> None:
        check_layers_of("dense_layers", self.dense_layers, model.layers)

    def eviction_refusal(self) -> str | None:
        return f"{OTHER_KEYS}, and heads='all' chooses one set for all" if self.heads == "all" else None

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        heads, k = model.kv_heads, max_keys(self.k, capacity)
        lists = 4 * rows * heads * (k + 1) + sampling_bytes(self.choose, model, rows, heads, capacity, k)
        most = max(logits_bytes(model, rows, capacity, dtype), lists)  # logits are gone when keys are chosen
        return 4 * rows * heads * capacity + most + redo_bytes(model, rows, self.redo)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.layer in self.dense_layers:
            return attend_densely(call, "in dense_layers")
        call.refuse_evicted(self)
        scores = exact_scores(call)
        one_set = self.heads == "all"
        if one_set:
            scores = call.sum_over_ranks(scores.sum(1, keepdim=True))
        chosen = keys_for_budget(call, scores, self.k, choose=self.choose, seed=self.seed, one_set=one_set)
        return outcome(call, call.attend(chosen), chosen, self.error_bars, self.redo)
