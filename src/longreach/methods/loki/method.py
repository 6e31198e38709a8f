"""Loki: approximate scores from keys in a few principal directions (Singhania et al., 2024, arXiv 2406.02542)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.cache import PerSlot, SequenceState
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import (
    AttentionMethod,
    LayerCall,
    ModelShape,
    Outcome,
    Reads,
    attend_densely,
    check_budget,
)
from longreach.methods.choosing import best_keys, check_layers, check_layers_of
from longreach.methods.loki.plan import KIND, LokiPlan
from longreach.ops import Selection, Span, Spans, near
from longreach.ops.types import accumulator, require
from longreach.plans import find

NEWEST = Spans((Span(near(0), near(1)),))


@dataclass(frozen=True)
class Loki(AttentionMethod):
    """The keys that score highest in the first directions of their principal components, and the newest key.

    A plan of kind "loki" holds, for each layer and KV head, the principal directions of the keys of a text, after
    rotation (the paper tries keys before rotation too). A key is kept in the first `rank` of them as well, in the
    cache's dtype, and scored there; attention over the chosen keys is exact.

    k: the budget, a count of keys or a fraction of the row's context (the paper: 0.25). rank: directions, a count or a
    fraction of the head dim (0.25 is the paper's 32 of 128). plan: a file, or a shipped plan's name; None: the plan
    that is shipped for the model. dense_layers: layers that attend densely (the paper has none).
    Under grouped queries, where the paper chooses for each query head, the probabilities that these scores give are
    summed over the query heads of a KV head, which share one list. Reads, as metadata, the `rank` coordinates of every
    key of the context, and the directions once a pass; and the newest key, to bring it there. The paper rotates the
    cache itself and reads as much; here the coordinates are kept beside it, which takes rank / D of K's memory.
    """

    k: int | float = 0.1
    rank: int | float = 0.25
    plan: str | None = None
    dense_layers: tuple[int, ...] = ()

    name = "loki"
    phases = ("decode",)
    follows = True

    def __post_init__(self) -> None:
        check_budget("k", self.k)
        check_budget("rank", self.rank)
        require(
            self.plan is None or (isinstance(self.plan, str) and self.plan != ""),
            f"plan: expected a file, the name of a shipped plan, or None, got {self.plan!r}",
        )
        check_layers("dense_layers", self.dense_layers)

    def check(self, model: ModelShape) -> None:
        check_layers_of("dense_layers", self.dense_layers, model.layers)
        self._directions(model.head_dim)
        LokiPlan.of(find(KIND, self.plan, model))

    def new_state(self, call: LayerCall, slots: int) -> Coordinates | None:
        if call.layer in self.dense_layers:
            return None
        if call.model is None:
            raise InvalidInput("loki: which plan fits depends on the model; expected a call that names it")
        k = call.kv.k
        basis = LokiPlan.of(find(KIND, self.plan, call.model)).basis[call.layer]
        basis = basis if call.shard is None else call.shard.slice(basis)
        return Coordinates(slots, basis[..., : self._directions(k.shape[3])].to(k.device, k.dtype))

    def follow(self, call: LayerCall, state: SequenceState | None) -> tuple[Selection, ...]:
        if isinstance(state, Coordinates):
            state.note(call)
        return ()

    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        if not isinstance(state, Coordinates):
            return attend_densely(call, "in dense_layers")
        if call.kv.slot_pos is not None:
            raise Unsupported("loki: after eviction a slot holds another key in each head; attend without evicting")
        state.note(call)
        chosen = best_keys(call, self._scores(call, state), self.k, last=1)
        read = (call.rows.pos.long() + 1) * state.bytes_of_key
        read[:1] += state.basis.numel() * state.basis.element_size()
        return Outcome(call.attend(chosen), Reads((NEWEST, chosen), (chosen,), read))

    def _scores(self, call: LayerCall, state: Coordinates) -> Tensor:
        """Probabilities by the coordinates alone, summed over a group: [R, G, N]; past the context anything."""
        x = state.logits(call)  # [R, G, group, N]
        x = x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)
        unseen = torch.arange(x.shape[3], device=x.device) > call.rows.pos[:, None, None, None]
        lse = x.masked_fill(unseen, -torch.inf).logsumexp(-1)
        if call.sink_logit is not None:
            lse = torch.logaddexp(lse, call.sink_logit.to(lse.dtype).view(1, x.shape[1], -1))
        return (x - lse[..., None]).exp().sum(2)

    def _directions(self, dim: int) -> int:
        count = self.rank if isinstance(self.rank, int) else max(1, round(self.rank * dim))
        require(count <= dim, f"rank: expected at most the head dim, {dim}, got {count}")
        return count


class Coordinates(PerSlot):
    """The keys of one layer in its first directions: ["keys"] is [slots, G, N, rank]; basis: [G, D, rank]."""

    def __init__(self, slots: int, basis: Tensor):
        super().__init__(slots, basis.shape[0], device=basis.device, keys=(basis.shape[2], basis.dtype))
        self.basis = basis

    @property
    def bytes_of_key(self) -> int:
        """Bytes of one token's coordinates in all heads."""
        return self["keys"].shape[1] * self["keys"].shape[3] * self["keys"].element_size()

    def note(self, call: LayerCall) -> None:
        """The rows' keys, from the cache."""
        self.fit(call.kv.capacity)
        seq, pos = call.rows.seq.long(), call.rows.pos.long()
        page, offset = call.kv.locate(seq, pos)
        dtype = accumulator(self.basis.dtype)
        with torch.inference_mode(False), torch.no_grad():
            found = torch.einsum("rgd,gde->rge", call.kv.k[page, :, offset].to(dtype), self.basis.to(dtype))
            self["keys"][call.slots[seq].long(), :, pos] = found.to(self.basis.dtype)

    def logits(self, call: LayerCall) -> Tensor:
        """Of the rows with every key that a sequence can hold, by the coordinates alone: [R, G, group, N]."""
        dtype = accumulator(self.basis.dtype)
        keys = self["keys"][call.slots[call.rows.seq.long()].long(), :, : call.kv.capacity].to(dtype)
        q = call.rows.q.to(dtype).unflatten(1, (call.kv.heads, -1))
        return torch.einsum("rghd,gde->rghe", q, self.basis.to(dtype)) @ keys.mT * call.scale
