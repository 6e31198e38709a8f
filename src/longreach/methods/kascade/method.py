"""Kascade: the best keys of a few anchor layers serve the layers after each (Deshmukh et al., 2025).

Decoding (section 3.6), a row at position L - 1 in layer l, g its KV head, h the query heads of g:

    p[h, n] = exp(logit[h, n] - lse[h])            over all L keys, its own included; a sink logit is in the lse
    s[g, n] = sum_h p[h, n]                        post-softmax pooling over the group (3.4)
    k(L)    = min(max(floor(k L), least), L)       (4.1)
    I[g]    = the k(L) largest of s[g, .]          in an anchor layer: ties to the lower index, ascending
    out[h]  = softmax over I[g] of logit[h, .] . V   there, and in the reuse layers after it over I[map[l][g]] (3.5)

An anchor reads K once: its logits are kept, pooled, and used again for the last pass, which reads V alone. The first
anchor attends densely (3.1) and reads K and V once. Reading a prompt is described in `prefill`.

With scoring="int8" the anchors that do not attend densely keep an 8-bit copy of their keys, are scored with it while
decoding, and read K of what they choose besides: (D + 4) / 2 D of the bytes of a bf16 K, the lists' keys and entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import (
    AttentionMethod,
    LayerCall,
    ModelShape,
    Outcome,
    Reads,
    attend_densely,
    check_budget,
    is_count,
)
from longreach.methods.choosing import check_layers, check_layers_of
from longreach.methods.kascade.copies import KeyCopy
from longreach.methods.kascade.part import Part, part_of
from longreach.methods.kascade.plan import KIND, KascadePlan
from longreach.methods.kascade.prefill import Tiles, choose_for_tiles, tiles_of
from longreach.ops import HeadShard, Lists, Logits, PackedLists, Selection, Spans, merge
from longreach.ops.types import require
from longreach.plans import find

EVERYTHING = Spans.dense()


class Choice(NamedTuple):
    """What an anchor leaves for the layers after it."""

    anchor: int
    lists: Lists | PackedLists


@dataclass(frozen=True)
class Kascade(AttentionMethod):
    """Top-k keys, chosen in the plan's anchor layers and reused in the others.

    plan: path of a plan file, name of a shipped plan, or None for the one that is shipped for the model.
    k: keys a row attends to: a fraction of its context, but at least `least` (the paper's minimum), or a count, which
        `least` does not change. Its own key is among them and counts.
    heads: "kv" chooses per KV head, and reuse layers take the lists of the heads that the plan's head map names; "all"
        makes one set for all heads, over all ranks, and needs no map (the paper's variant).
    sinks, recent: the first tokens and the last (a row's own among them) that are always chosen, within k.
    dense_below: rows of a shorter context attend to all of it; in a prompt, tiles that begin so.
    dense_layers: layers that attend densely beside the first anchor; anchors among them choose keys all the same.
    scoring: "exact", or "int8": keys are chosen while decoding by an 8-bit copy of the anchors' keys, and attended to
        as they are. The copy is made as prompts are read and tokens come; the report counts it as metadata.

    A prompt read in chunks gives the same sets as read at once where chunks end at the tiles' ends, at multiples of
    tile // group tokens (plan.tile = 128 rows, the query heads of a KV head counted). A tile that two chunks share
    is pooled over the rows of each apart, as if it were two tiles whose past ends where it begins.
    """

    plan: str | None = None
    k: int | float = 0.1
    least: int = 128
    heads: Literal["kv", "all"] = "kv"
    sinks: int = 0
    recent: int = 1
    dense_below: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["exact", "int8"] = "exact"

    name = "kascade"
    phases = ("prefill", "decode")
    chunked_prefill_exact = False

    def __post_init__(self) -> None:
        named = self.plan is None or (isinstance(self.plan, str) and bool(self.plan))
        require(named, f"plan: expected a path, the name of a shipped plan, or None, got {self.plan!r}")
        check_budget("k", self.k)
        require(is_count(self.least, 1), f"least: expected a count >= 1, got {self.least!r}")
        require(self.heads in ("kv", "all"), f"heads: expected 'kv' or 'all', got {self.heads!r}")
        require(is_count(self.sinks), f"sinks: expected a count, got {self.sinks!r}")
        require(is_count(self.recent, 1), f"recent: expected a count >= 1, got {self.recent!r}")
        fewest = self.k if isinstance(self.k, int) else self.least
        require(
            self.sinks + self.recent <= fewest,
            f"sinks + recent: expected at most {fewest}, the fewest keys that are chosen, got {self.sinks} and "
            f"{self.recent}",
        )
        require(is_count(self.dense_below), f"dense_below: expected a count, got {self.dense_below!r}")
        check_layers("dense_layers", self.dense_layers)
        require(self.scoring in ("exact", "int8"), f"scoring: expected 'exact' or 'int8', got {self.scoring!r}")

    @property
    def follows(self) -> bool:  # type: ignore[override]  # only where a copy is made of the prompt's keys too
        return self.scoring == "int8"

    def check(self, model: ModelShape) -> None:
        KascadePlan.of(find(KIND, self.plan, model))
        check_layers_of("dense_layers", self.dense_layers, model.layers)

    def new_state(self, call: LayerCall, slots: int) -> Part:
        if call.model is None:
            raise InvalidInput("kascade: expected to be told of the model (LayerCall.model), by which plans are found")
        part = part_of(
            KascadePlan.of(find(KIND, self.plan, call.model)),
            call.layer,
            mapped=self.heads == "kv",
            dense_layers=self.dense_layers,
            shard=call.shard or HeadShard.whole(call.kv.heads),
            device=call.rows.pos.device,
        )
        copied = self.scoring == "int8" and part.anchor == call.layer and part.dense is None
        return replace(part, copy=KeyCopy(call.kv)) if copied else part

    def follow(self, call: LayerCall, state: SequenceState | None) -> tuple[Selection, ...]:
        place = (self, "noted", call.layer)
        if isinstance(state, Part) and state.copy is not None and place not in call.passed:
            state.copy.note(call)
            call.passed[place] = True  # where it reads the prompt too, that has noted them already
        return ()

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if call.kv.slot_pos is not None:
            raise Unsupported("kascade: after eviction a slot holds other keys in each layer; attend without evicting")
        part = state if isinstance(state, Part) else self.new_state(call, 1)
        if part.copy is not None and state is None and call.phase == "decode":
            raise InvalidInput(
                "kascade: scoring='int8' decodes with a copy of all keys; expected the state that holds it"
            )
        self.follow(call, part)
        if part.dense and not part.serves:
            return attend_densely(call, part.dense)
        if call.layer != part.anchor:
            return self._reuse(call, part)
        return self._anchor(call, part) if call.phase == "decode" else self._anchor_of_tiles(call, part)

    def keys(self, available: Tensor, context: Tensor) -> Tensor:
        """How many of the `available` keys are chosen for a row, or tile, of this context: int64."""
        if isinstance(self.k, int):
            chosen = available.clamp(max=self.k)
        else:  # the fraction as the caller wrote it: 0.29 of 100 is 29, not 28.999999999999996 rounded down
            chosen = (self.k * available.double() + 1e-9).long().clamp(min=self.least).minimum(available)
        return torch.where(context < self.dense_below, available, chosen) if self.dense_below else chosen

    def most(self, capacity: int) -> int:
        """The largest of `keys` for contexts up to `capacity`."""
        chosen = self.k if isinstance(self.k, int) else max(int(self.k * capacity + 1e-9), self.least)
        return min(max(chosen, self.dense_below - 1), capacity)

    def over_heads(self, call: LayerCall, scores: Tensor) -> Tensor:
        """Pooled scores [L, G, N] as they are, or [L, 1, N] where one set serves all heads, those of all ranks."""
        return scores if self.heads == "kv" else call.sum_over_ranks(scores.sum(1, keepdim=True))

    def _anchor(self, call: LayerCall, part: Part) -> Outcome:
        """Decoding: each row chooses."""
        if part.dense:
            whole, logits = call.attend_keeping()
            self._choose(call, whole.lse, logits)
            return Outcome(whole, Reads((EVERYTHING,), (EVERYTHING,)), part.dense)
        if part.copy is not None:
            chosen = self._choose(call, *call.score_keys(part.copy.keys))
            return Outcome(call.attend(chosen), Reads((chosen,), (chosen,), part.copy.bytes_read(call)))
        lse, logits = call.score_keys()
        chosen = self._choose(call, lse, logits)
        return Outcome(call.attend_values(chosen, logits), Reads((EVERYTHING,), (chosen,)))

    def _choose(self, call: LayerCall, lse: Tensor, logits: Logits) -> Lists:
        """The keys of each row, for this layer and those after it."""
        scores = self.over_heads(call, call.pooled_scores(lse, logits=logits).float())
        place = (self, "lengths")
        if place not in call.passed:  # the same in all layers of a pass
            length = call.rows.pos.long() + 1
            call.passed[place] = length, self.keys(length, length)[:, None].repeat(1, scores.shape[1])
        length, count = call.passed[place]
        most = self.most(call.kv.capacity)
        index, used = call.top_k(scores, count, length, first=self.sinks, last=self.recent, capacity=most)
        chosen = Lists(index, used, in_sight=True)
        call.passed[self] = Choice(call.layer, chosen)
        return chosen

    def _anchor_of_tiles(self, call: LayerCall, part: Part) -> Outcome:
        """Reading a prompt: each tile chooses."""
        tiles = self._tiles(call, part)
        call.passed.pop(self, None)  # lists that no later layer uses may be large
        chosen = choose_for_tiles(self, call, tiles)
        call.passed[self] = Choice(call.layer, chosen)
        if part.dense:
            return Outcome(call.attend(EVERYTHING), Reads((EVERYTHING, tiles.scored), (EVERYTHING,)), part.dense)
        over = self._over(call, chosen, tiles)
        return Outcome(over.partial, Reads((tiles.scored, *over.reads.keys), over.reads.values))

    def _reuse(self, call: LayerCall, part: Part) -> Outcome:
        left = call.passed.get(self)
        if left is None or left.anchor != part.anchor:
            raise InvalidInput(
                f"kascade: layer {call.layer} reuses what layer {part.anchor} chooses, and that did not choose in this "
                f"pass (does it attend to a window?); make a plan for the model as it is (longreach calibrate kascade)"
            )
        lists = left.lists if part.head_of is None else replace(left.lists, head_of=part.head_of)
        if call.phase == "prefill":
            return self._over(call, lists, self._tiles(call, part))
        return Outcome(call.attend(lists), Reads((lists,), (lists,)))

    def _over(self, call: LayerCall, chosen: Lists | PackedLists, tiles: Tiles) -> Outcome:
        """Attention over what tiles chose of what is before them, and over their own keys."""
        partial = merge(call.attend(chosen), call.attend(tiles.own, sink=False))
        return Outcome(partial, Reads((chosen, tiles.own), (chosen, tiles.own)))

    def _tiles(self, call: LayerCall, part: Part) -> Tiles:
        """The same in all layers of a pass."""
        place = (self, "tiles")
        if place not in call.passed:
            group = call.rows.q.shape[1] // call.kv.heads
            call.passed[place] = tiles_of(call.rows, max(1, part.tile // group))
        return call.passed[place]
