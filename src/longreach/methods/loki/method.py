"""Loki: approximate scores from keys in a few principal directions (Singhania et al., 2024, arXiv 2406.02542)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import PerTokenState, SequenceState
from longreach.errors import InvalidInput
from longreach.methods.automatic import AwaitsPlan, plan_for
from longreach.methods.base import AttentionMethod, Outcome, attend_densely, check_budget, check_plan_name, logits_bytes
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import (
    Choose,
    check_choice,
    check_layers,
    check_layers_of,
    keys_for_budget,
    max_keys,
    sampling_bytes,
)
from longreach.methods.error_bars import check_error_bars, outcome, redo_bytes
from longreach.methods.loki.automatic import LokiMaker
from longreach.methods.loki.plan import KIND, LokiPlan
from longreach.ops import KVView, Rows
from longreach.ops.project import pad_basis, project_keys
from longreach.ops.types import require
from longreach.plans import is_automatic


@dataclass(frozen=True)
class Loki(AttentionMethod):
    """Attention to the keys that score highest in their first principal components, and to the newest key.

    A plan of kind "loki" holds the principal directions of each layer's and KV head's keys of a text, after rotation
    (the paper also tries keys before rotation). The state keeps every key's coordinates in the first `rank` directions,
    in the cache's dtype, and scores them. Attention to the chosen keys is exact.

    k: the budget, a count of keys or a fraction of the row's context (the paper: 0.25).
    rank: directions, a count or a fraction of the head dim (0.25 is the paper's 32 of 128).
    plan: a file or a shipped plan's name. None: the shipped plan of the model, else as "auto". "auto": a plan that the
        session makes of its first prompt, or one kept in the user's cache folder from before; until then the method
        attends densely. "none": the shipped plan of the model, or InvalidInput.
    dense_layers: layers that attend densely (the paper has none).
    choose: "top", or "sample": keys are drawn by their scores and weighted (`choosing.chosen_keys`).
    seed: of the draw.
    error_bars: with choose="sample": the report gives the standard error of the output (`methods.error_bars`), at
        the cost of reading the sampled keys and values twice.
    redo: rows whose relative error exceeds this attend densely; it includes error_bars.

    With grouped queries the softmax probabilities of the scores are summed over the query heads of a KV head, which
    share one list; the paper chooses for each query head. Metadata read: `rank` coordinates of every key of the
    context, and the directions once a pass. The newest key is read to compute its coordinates. The paper rotates
    the cache itself; here the coordinates take rank / D of K's memory in addition.
    """

    k: int | float = 0.1
    rank: int | float = 0.25
    plan: str | None = None
    dense_layers: tuple[int, ...] = ()
    choose: Choose = "top"
    seed: int = 0
    error_bars: bool = False
    redo: float | None = None

    name = "loki"
    phases = ("decode",)
    keeps = "tokens"
    observes_prompt = True

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        check_budget("rank", self.rank)
        check_plan_name(self.plan)
        check_layers("dense_layers", self.dense_layers)
        check_choice(self.choose, self.seed)
        check_error_bars(self.error_bars, self.redo, sampled=self.choose == "sample")

    @property
    def reads_follow_lengths(self) -> bool:  # type: ignore[override]  # how many rows are redone depends on keys
        return self.redo is None

    def check(self, model: ModelShape) -> None:
        check_layers_of("dense_layers", self.dense_layers, model.layers)
        self._directions(model.head_dim)
        self.plan_of(model)

    def plan_of(self, model: ModelShape) -> LokiPlan | None:
        """The plan for a model; None while the session has yet to make it. Raises InvalidInput as `plans.find`."""
        found = plan_for(KIND, self.plan, model)
        return None if found is None else LokiPlan.of(found)

    def plan_maker(self, model: ModelShape) -> LokiMaker | None:
        return LokiMaker() if is_automatic(KIND, self.plan, model) else None

    def new_state(self, call: LayerCall, slots: int) -> Coordinates | AwaitsPlan | None:
        if call.layer in self.dense_layers:
            return None
        if call.model is None:
            raise InvalidInput("LayerCall.model is required: Loki looks up its plan by model")
        k, plan = call.kv.k, self.plan_of(call.model)
        if plan is None:
            return AwaitsPlan.of(KIND, call.model)
        basis = plan.basis[call.layer]
        basis = basis if call.shard is None else call.shard.slice(basis)
        return Coordinates(call.kv, pad_basis(basis[..., : self._directions(k.shape[3])].to(k.device, k.dtype)))

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        if isinstance(state, Coordinates):
            state.ensure_capacity(call.kv)
            state.note(call.kv, call.rows.seq, call.rows.pos)

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if isinstance(state, AwaitsPlan):
            return attend_densely(call, state.reason)
        if not isinstance(state, Coordinates):
            return attend_densely(call, "in dense_layers")
        state.ensure_capacity(call.kv)
        q = call.op("project", state.basis, state["keys"])
        here = Rows(q, call.rows.seq, call.rows.pos, call.rows.runs)
        scores = call.op("score_and_pool", kv=state.view(call.kv), rows=here, metadata=True)
        chosen = keys_for_budget(call, scores, self.k, last=1, choose=self.choose, seed=self.seed)
        return outcome(call, call.attend(chosen), chosen, self.error_bars, self.redo)

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        return self.dense_layers

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        heads, k = model.kv_heads, max_keys(self.k, capacity)
        lists = 4 * rows * heads * (k + 1) + sampling_bytes(self.choose, model, rows, heads, capacity, k)
        most = max(logits_bytes(model, rows, capacity, dtype), lists)  # logits are gone when keys are chosen
        return 4 * rows * heads * capacity + most + redo_bytes(model, rows, self.redo)

    def _directions(self, dim: int) -> int:
        count = self.rank if isinstance(self.rank, int) else max(1, round(self.rank * dim))
        require(count <= dim, f"rank: expected at most the head dim, {dim}, got {count}")
        return count


class Coordinates(PerTokenState):
    """The keys of one layer in its first directions: ["keys"] is [P, G, page, width]. basis: [G, D, width]."""

    def __init__(self, kv: KVView, basis: Tensor):
        super().__init__(kv, keys=(basis.shape[2], basis.dtype))
        self.basis = basis

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.basis.nbytes

    def view(self, kv: KVView) -> KVView:
        """The coordinates, to be scored in the place of the layer's keys."""
        return KVView(self["keys"], self["keys"], kv.seq_lens, kv.block_table)

    def note(self, kv: KVView, seq: Tensor, slot: Tensor) -> None:
        none = kv.k.new_zeros(()).expand(seq.shape[0], kv.heads, kv.k.shape[3])  # no queries are projected
        with torch.inference_mode(False), torch.no_grad():
            project_keys(Rows(none, seq, slot), kv, self.basis, self["keys"])
