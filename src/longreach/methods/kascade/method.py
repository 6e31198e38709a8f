"""Kascade: the best keys of a few anchor layers serve the layers after each (Deshmukh et al., 2025).

Decoding (section 3.6), a row at position L - 1 in layer l, g its KV head, h the query heads of g:

    p[h, n] = exp(logit[h, n] - lse[h])            over all L keys, its own included; a sink logit is in the lse
    s[g, n] = sum_h p[h, n]                        post-softmax pooling over the group (3.4)
    k(L)    = min(max(floor(k L), min_keys), L)    (4.1)
    I[g]    = the k(L) largest of s[g, .]          in an anchor layer: ties to the lower index, ascending
    out[h]  = softmax over I[g] of logit[h, .] . V   there, and in the reuse layers after it over I[map[l][g]] (3.5)

An anchor reads K once: its logits are kept, pooled and used again in the last pass, which reads V only. The first
anchor attends densely (3.1) and reads K and V once. `prefill` describes how a prompt is read.

With scoring="int8" anchors that do not attend densely keep an 8-bit copy of their keys. In decode they read it for the
scores, (D + 4) / 2 D of the bytes of a bf16 K, and in addition K of the chosen keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput
from longreach.methods.automatic import AwaitsPlan, plan_for
from longreach.methods.base import (
    AttentionMethod,
    Notes,
    Outcome,
    attend_densely,
    check_budget,
    check_plan_name,
    is_count,
    logits_bytes,
)
from longreach.methods.call import LayerCall, ModelShape
from longreach.methods.choosing import (
    OTHER_KEYS,
    Choose,
    check_choice,
    check_layers,
    check_layers_of,
    chosen_keys,
    sampling_bytes,
)
from longreach.methods.error_bars import check_error_bars, outcome, redo_bytes
from longreach.methods.kascade.automatic import KascadeMaker
from longreach.methods.kascade.budget import KeyBudget
from longreach.methods.kascade.plan import KIND, KascadePlan, tokens_of_tile
from longreach.methods.kascade.prefill import PromptTiles, choose_for_tiles, scored_rows, tiles_of
from longreach.methods.kascade.quantised_keys import QuantisedKeys
from longreach.methods.kascade.role import role_of
from longreach.methods.kascade.state import KascadeState
from longreach.ops import HeadShard, Lists, Logits, TileLists
from longreach.ops.doors import EVERYTHING
from longreach.ops.tile_lists import with_lists
from longreach.ops.types import require
from longreach.plans import is_automatic

COVERED = "the budget covers all keys"


class AnchorSelection(NamedTuple):
    """The lists that an anchor leaves for the layers after it: of rows (decode), or of tiles (prefill)."""

    anchor: int
    lists: Lists | TileLists


@dataclass(frozen=True)
class Kascade(AttentionMethod):
    """Attention to top-k keys, chosen in the plan's anchor layers and reused in the others.

    plan: path of a plan file, or name of a shipped plan. None: the shipped plan of the model, else as "auto". "auto": a
        plan that the session makes of its first prompt (`kascade.automatic`), or one kept in the user's cache folder
        from before; until then the method attends densely. "none": the shipped plan of the model, or InvalidInput.
    k: keys a row attends to, its own included: a fraction of its context, but at least `min_keys`, or a count, which
        `min_keys` does not change.
    heads: "kv" chooses per KV head, and reuse layers take the lists of the heads that the plan's head map names. "all"
        makes one set for all heads of all ranks and needs no map (the paper's variant).
    min_keys: the fewest keys of a row whose k is a fraction (the paper's minimum).
    sinks, recent: number of first and of last tokens (a row's own included) that are always chosen, within k.
    dense_below: rows with a shorter context attend to all of it; in a prompt, tiles that begin below it. None: the
        number of tokens below which the plan has dense attention as the faster on this device (`longreach plan
        break-even`), else 0.
    dense_layers: layers that attend densely, in addition to the first anchor. Anchors among them still choose keys.
    scoring: "exact", or "int8": in decode an 8-bit copy of the anchors' keys is scored; attention reads the original
        keys. The copy is written during prefill and decode. The report counts it as metadata.
    lse_every: in a prompt, the log-sum-exp by which rows of a tile are weighted against each other is estimated from
        each n-th key: n = 1, from all (exact). Layers that attend densely have the exact one and do not use this.
        The chosen keys hold a little less weight: the report names it.
    score_every: in a prompt, a tile is scored by each n-th of its rows, the first included: n = 1, by all (exact).
        The passes over all keys count an n-th of the reads, and the chosen keys hold less weight: the report names it.
    choose: in decode: "top", or "sample": keys are drawn by the square root of their scores in the anchor, and weighted
        (`choosing.chosen_keys`). Scores of another layer are no better a guess than that.
    seed: of the draw.
    error_bars: in decode with choose="sample": the report gives the standard error of the output
        (`methods.error_bars`), at the cost of reading the sampled keys and values twice.
    redo: in decode, rows whose relative error exceeds this attend densely; it includes error_bars.

    A prompt read in chunks gives the same sets as read at once if chunks end at tile ends, at multiples of
    tile // group tokens (plan.tile = 128 rows, the query heads of a KV head counted). A tile that two chunks share is
    pooled over the rows of each chunk separately, as if it were two tiles with the same past.
    """

    plan: str | None = None
    k: int | float = 0.1
    min_keys: int = 128
    heads: Literal["kv", "all"] = "kv"
    sinks: int = 0
    recent: int = 1
    dense_below: int | None = None
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["exact", "int8"] = "exact"
    lse_every: int = 1
    score_every: int = 1
    choose: Choose = "top"
    seed: int = 0
    error_bars: bool = False
    redo: float | None = None

    name = "kascade"
    phases = ("prefill", "decode")
    keeps = "tokens"
    chunked_prefill_exact = False

    def __post_init__(self) -> None:
        check_plan_name(self.plan)
        check_budget("k", self.k)
        require(is_count(self.min_keys, 1), f"min_keys: expected a count >= 1, got {self.min_keys!r}")
        require(self.heads in ("kv", "all"), f"heads: expected 'kv' or 'all', got {self.heads!r}")
        require(is_count(self.sinks), f"sinks: expected a count, got {self.sinks!r}")
        require(is_count(self.recent, 1), f"recent: expected a count >= 1, got {self.recent!r}")
        fewest = self.k if isinstance(self.k, int) else self.min_keys
        require(
            self.sinks + self.recent <= fewest,
            f"sinks + recent: expected at most {fewest}, the fewest keys that are chosen, got {self.sinks} and "
            f"{self.recent}",
        )
        below = self.dense_below
        require(below is None or is_count(below), f"dense_below: expected a count or None, got {below!r}")
        check_layers("dense_layers", self.dense_layers)
        require(self.scoring in ("exact", "int8"), f"scoring: expected 'exact' or 'int8', got {self.scoring!r}")
        require(is_count(self.lse_every, 1), f"lse_every: expected a count >= 1, got {self.lse_every!r}")
        require(is_count(self.score_every, 1), f"score_every: expected a count >= 1, got {self.score_every!r}")
        check_choice(self.choose, self.seed)
        check_error_bars(self.error_bars, self.redo, sampled=self.choose == "sample")

    @property
    def observes_prompt(self) -> bool:  # type: ignore[override]  # only the 8-bit copy depends on the prompt's keys
        return self.scoring == "int8"

    @property
    def reads_follow_lengths(self) -> bool:  # type: ignore[override]  # how many rows are redone depends on keys
        return self.redo is None

    @property
    def budget(self) -> KeyBudget:
        """By the options alone: `dense_below` of the plan is left out."""
        return KeyBudget(self.k, self.min_keys, self.dense_below or 0, self.sinks, self.recent, self.heads == "all")

    def check(self, model: ModelShape) -> None:
        self.plan_of(model)
        check_layers_of("dense_layers", self.dense_layers, model.layers)

    def check_prompts(self, model: ModelShape) -> None:
        plan = self.plan_of(model)
        if plan is not None:
            tokens_of_tile(plan.tile, model.query_heads // model.kv_heads)

    def plan_of(self, model: ModelShape) -> KascadePlan | None:
        """The plan for a model; None while the session has yet to make it. Raises InvalidInput as `plans.find`."""
        found = plan_for(KIND, self.plan, model)
        return None if found is None else KascadePlan.of(found)

    def plan_maker(self, model: ModelShape) -> KascadeMaker | None:
        return KascadeMaker(model.query_heads // model.kv_heads) if is_automatic(KIND, self.plan, model) else None

    def new_state(self, call: LayerCall, slots: int) -> KascadeState | AwaitsPlan:
        if call.model is None:
            raise InvalidInput("LayerCall.model is required: Kascade looks up its plan by model")
        plan = self.plan_of(call.model)
        if plan is None:
            return AwaitsPlan.of(KIND, call.model)
        role = role_of(
            plan,
            call.layer,
            mapped=self.heads == "kv",
            dense_layers=self.dense_layers,
            shard=call.shard or HeadShard.whole(call.kv.heads),
            device=call.rows.pos.device,
        )
        copied = self.scoring == "int8" and role.anchor == call.layer and role.dense is None
        return KascadeState(role, QuantisedKeys(call.kv) if copied else None)

    def observe_prompt(self, call: LayerCall, state: SequenceState | None) -> None:
        place = (self, "noted", call.layer)
        if isinstance(state, KascadeState) and state.copy is not None and place not in call.shared:
            state.copy.ensure_capacity(call.kv)
            state.copy.note(call.kv, call.rows.seq, call.rows.pos)
            call.shared[place] = True  # as prefill method, `run` has noted the rows already

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        call.refuse_evicted(self)
        mine = state if isinstance(state, KascadeState | AwaitsPlan) else self.new_state(call, 1)
        if isinstance(mine, AwaitsPlan):
            return attend_densely(call, mine.reason)
        if mine.copy is not None and state is None and call.phase == "decode":
            raise InvalidInput("kascade: scoring='int8' decodes with a copy of all keys; pass the state that holds it")
        self.observe_prompt(call, mine)
        role = mine.role
        if role.dense and not role.serves:
            return attend_densely(call, role.dense)
        if call.phase == "decode" and call.kv.capacity < self._limit(call, mine):
            return attend_densely(call, role.dense or self._short(call, mine))
        if call.layer != role.anchor:
            return self._reuse(call, mine)
        return self._anchor(call, mine) if call.phase == "decode" else self._anchor_of_tiles(call, mine)

    def eviction_refusal(self) -> str:
        return OTHER_KEYS

    def whole_layers(self, model: ModelShape, dtype: torch.dtype) -> Collection[int]:
        plan = self.plan_of(model)
        if plan is None:
            return super().whole_layers(model, dtype)
        anchors = plan.anchors if self.scoring == "exact" else plan.anchors[:1]  # others score their 8-bit copies
        return {*anchors, *self.dense_layers}

    def workspace_bytes(self, model: ModelShape, rows: int, capacity: int, dtype: torch.dtype) -> int:
        plan, budget = self.plan_of(model), self.budget
        if plan is not None and self.dense_below is None:
            most = max((phases.get("decode", 0) for phases in plan.dense_below.values()), default=0)
            budget = budget._replace(dense_below=most)
        heads, chosen = 1 if self.heads == "all" else model.kv_heads, budget.max_keys(capacity)
        scores = 4 * rows * (model.kv_heads * capacity + heads * (capacity + chosen + 1))
        scores += sampling_bytes(self.choose, model, rows, heads, capacity, chosen) + redo_bytes(model, rows, self.redo)
        return logits_bytes(model, rows, capacity, dtype) + scores

    def _anchor(self, call: LayerCall, state: KascadeState) -> Outcome:
        """Decode: each row chooses."""
        if state.role.dense:
            whole, logits = call.op("attend_with_logits")
            self._choose(call, state, whole.lse, logits)
            return Outcome(whole, state.role.dense)
        if state.copy is not None:
            lse, logits = call.op("score_keys", keys=state.copy.scoring)
            chosen = self._choose(call, state, lse, logits)
            return outcome(call, call.attend(chosen), chosen, self.error_bars, self.redo)
        lse, logits = call.op("score_keys")
        chosen = self._choose(call, state, lse, logits)
        return outcome(call, call.op("attend_from_logits", chosen, logits), chosen, self.error_bars, self.redo)

    def _choose(self, call: LayerCall, state: KascadeState, lse: Tensor, logits: Logits) -> Lists:
        """The keys of each row, for this layer and those after it."""
        budget = self._budget(call, state)
        scores = budget.over_heads(call, call.op("pooled_scores", lse=lse, logits=logits).float())
        heads = scores.shape[1]
        count = call.once((self, heads), lambda: budget.keys(call.context, call.context)[:, None].repeat(1, heads))
        capacity = budget.max_keys(call.kv.capacity)
        chosen = chosen_keys(
            call, scores, count, first=self.sinks, last=self.recent, capacity=capacity, choose=self.choose,
            seed=self.seed, power=0.5, one_set=self.heads == "all",
        )  # fmt: skip
        call.shared[self] = AnchorSelection(call.layer, chosen)
        return chosen

    def _anchor_of_tiles(self, call: LayerCall, state: KascadeState) -> Outcome:
        """Prefill: each tile chooses."""
        tiles = self._tiles(call, state)
        if not tiles.choosing:
            return self._all_keys(call, state)
        call.shared.pop(self, None)  # lists that no later layer uses may be large
        whole = call.attend(EVERYTHING) if state.role.dense else None
        scored = call.once((self, "scored"), lambda: scored_rows(call, tiles, self.score_every, self.lse_every))
        lse = None if whole is None else whole.lse
        chosen = choose_for_tiles(self._budget(call, state), call, tiles, scored, lse, self.lse_every)
        call.shared[self] = AnchorSelection(call.layer, chosen)
        notes = _sampling_notes(call, self.score_every, 1 if whole is not None else self.lse_every)
        if whole is not None:
            return Outcome(whole, state.role.dense, notes)
        return Outcome(call.attend(chosen), None, notes, partly_dense=self._partly_dense(call, state, tiles))

    def _reuse(self, call: LayerCall, state: KascadeState) -> Outcome:
        role, left = state.role, call.shared.get(self)
        if call.phase == "prefill" and not self._tiles(call, state).choosing:
            return self._all_keys(call, state)
        if left is None or left.anchor != role.anchor:
            raise InvalidInput(
                f"kascade: layer {call.layer} reuses the keys that layer {role.anchor} chooses, and that layer chose "
                f"none in this pass (does it attend to a window?); make a plan for the model as it is "
                f"(longreach calibrate kascade)"
            )
        if isinstance(left.lists, TileLists):
            attended = call.attend(with_lists(left.lists, role.head_map))
            return Outcome(attended, partly_dense=self._partly_dense(call, state, self._tiles(call, state)))
        lists = left.lists if role.head_map is None else replace(left.lists, head_map=role.head_map)
        return outcome(call, call.attend(lists), lists, self.error_bars, self.redo)

    def _all_keys(self, call: LayerCall, state: KascadeState) -> Outcome:
        """Prefill of prompts so short that no tile leaves out a key: exact, by the fastest kernel for it."""
        reason = self._short(call, state) if self._tiles(call, state).host.short_rows else COVERED
        return attend_densely(call, state.role.dense or reason)

    def _limit(self, call: LayerCall, state: KascadeState) -> int:
        """The context below which rows of this phase attend to all keys."""
        if self.dense_below is not None:
            return self.dense_below
        found = state.role.break_even
        return found.decode if call.phase == "decode" else found.prefill

    def _budget(self, call: LayerCall, state: KascadeState) -> KeyBudget:
        return self.budget._replace(dense_below=self._limit(call, state))

    def _short(self, call: LayerCall, state: KascadeState) -> str:
        """The reason for the report."""
        few = f"fewer than {self._limit(call, state)} tokens"
        if self.dense_below is not None:
            return f"{few} (dense_below)"
        return f"{few}, dense is faster on {state.role.break_even.device} (plan)"

    def _partly_dense(self, call: LayerCall, state: KascadeState, tiles: PromptTiles) -> tuple[str, int] | None:
        """The rows of a pass that attend to all keys because of `dense_below`, for the report."""
        return (self._short(call, state), tiles.host.short_rows) if tiles.host.short_rows else None

    def _tiles(self, call: LayerCall, state: KascadeState) -> PromptTiles:
        group = call.rows.q.shape[1] // call.kv.heads
        tokens = tokens_of_tile(state.role.tile, group)
        return call.once((self, "tiles"), lambda: tiles_of(call.rows, tokens, self._budget(call, state)))


def _sampling_notes(call: LayerCall, rows: int, keys: int) -> Notes | None:
    """For the report: which rows of a tile were scored, and which keys the lse was estimated from."""
    notes = [f"tiles scored by every {rows}th row"] * (rows > 1) + [f"lse from every {keys}th key"] * (keys > 1)
    if not notes:
        return None
    note = {"note": "; ".join(notes), "score_every": rows, "lse_every": keys}
    none = call.rows.pos[:, None, None]
    return Notes((none,), lambda x: torch.zeros_like(x, dtype=torch.float64), lambda sums, rows: note)
