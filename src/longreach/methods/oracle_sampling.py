"""Oracle sampling: keys drawn by their exact probabilities. A bound on what sampling reaches, for evaluation only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.methods.base import (
    AttentionMethod,
    Outcome,
    attend_densely,
    budget,
    check_budget,
    is_count,
    logits_bytes,
)
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import (
    check_layers,
    check_layers_of,
    exact_scores,
    keys_for_budget,
    max_keys,
    sampling_bytes,
)
from longreach.methods.error_bars import SampledLists, check_error_bars, outcome, redo_bytes
from longreach.ops import Lists, uniforms
from longreach.ops.types import require

DRAWS = 1 << 24  # numbers of a head: the draw n of head h is number h DRAWS + n, whatever the batch


@dataclass(frozen=True)
class OracleSampling(AttentionMethod):
    """Attention to keys drawn by their post-softmax scores, summed over the query heads of a KV head, and weighted.

    k: draws, a count or a fraction of the row's context.
    draw: "iid", independently and with replacement, as the paper of MagicPIG defines oracle sampling (arXiv
        2410.16179, Def. 3.1): a key drawn n times of B weighs n / (B p). "systematic", without replacement
        (`ops.sample`): as many distinct keys, and less error.
    seed: with the layer, the row's position and the KV head it fixes the draw.
    dense_layers: layers that attend densely.
    error_bars: the report gives the standard error of the output (`methods.error_bars`), at the cost of reading the
        sampled keys and values twice.
    redo: rows whose relative error exceeds this attend densely; it includes error_bars.

    Both are unbiased over seeds. Where each query head has a KV head of its own, "iid" is the mean of the drawn
    values.

    Like `oracle_top_k` it reads all keys twice to know their scores, and shows quality, not speed.
    """

    k: int | float = 0.1
    draw: Literal["iid", "systematic"] = "iid"
    seed: int = 0
    dense_layers: tuple[int, ...] = ()
    error_bars: bool = False
    redo: float | None = None

    name = "oracle_sampling"
    phases = ("decode",)
    capture = "piecewise"  # it is for evaluation: a full graph would gain nothing
    reads_follow_lengths = False  # how many distinct keys are drawn depends on the scores

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        require(not isinstance(self.k, int) or self.k <= DRAWS, f"k: expected at most {DRAWS} draws, got {self.k!r}")
        require(self.draw in ("iid", "systematic"), f"draw: expected 'iid' or 'systematic', got {self.draw!r}")
        require(is_count(self.seed), f"seed: expected a count, got {self.seed!r}")
        check_layers("dense_layers", self.dense_layers)
        check_error_bars(self.error_bars, self.redo)

    def check(self, model: ModelShape) -> None:
        check_layers_of("dense_layers", self.dense_layers, model.layers)

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        heads, k = model.kv_heads, max_keys(self.k, capacity)
        if self.draw == "systematic":
            lists = 4 * rows * heads * (k + 1) + sampling_bytes("sample", model, rows, heads, capacity, k)
        else:
            lists = 160 * rows * heads * capacity  # in PyTorch: fp64 probabilities, their sums and order
        most = max(logits_bytes(model, rows, capacity, dtype), lists)  # logits are gone when keys are drawn
        return 4 * rows * heads * capacity + most + redo_bytes(model, rows, self.redo)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.layer in self.dense_layers:
            return attend_densely(call, "in dense_layers")
        scores = exact_scores(call)
        if self.draw == "systematic":
            lists: Lists = keys_for_budget(call, scores, self.k, choose="sample", seed=self.seed)
            return outcome(call, call.attend(lists), lists, self.error_bars, self.redo)
        lists, draws = self._drawn(call, scores)
        return outcome(call, call.attend(lists), lists, self.error_bars, self.redo, draws)

    def _drawn(self, call: LayerCall, scores: Tensor) -> tuple[SampledLists, Tensor]:
        """Lists, and how often each was drawn from, int [R, G]."""
        heads, draws = scores.shape[1], max_keys(self.k, call.kv.capacity)
        first = 0 if call.shard is None else call.shard.first
        number = torch.arange(first, first + heads, device=scores.device)[:, None] * DRAWS
        number = (number + torch.arange(draws, device=scores.device)).flatten()
        numbers = uniforms(self.seed, call.layer, call.rows.pos, number).unflatten(1, (heads, draws))
        count = call.once((self, "draws"), lambda: budget(self.k, call.context)[:, None].repeat(1, heads))
        index, used, weight, factor = call.op("draw", scores.float(), count, call.context, numbers)
        return SampledLists(index, used, weight, all_visible=True, factor=factor), count
