"""What a method is: a frozen config that turns queries and history into Selections and Partials."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from longreach.cache import KVCache, SequenceState
from longreach.errors import UnknownName
from longreach.ops import Bound, HeadShard, KVView, Logits, Partial, Rows, ScoringKeys, Selection, Spans, Turn, top_k
from longreach.ops.attend import (
    Entries,
    amending,
    attend,
    attend_amend,
    attend_keeping,
    attend_values,
    resolve,
    score_keys,
)
from longreach.ops.attend.keeping import keeping, scoring, valuing
from longreach.ops.impl import Implementations
from longreach.ops.nearest import Matched, Ring, Rule, match
from longreach.ops.nearest import implementations as matching
from longreach.ops.pooled_scores import implementations as pooling
from longreach.ops.pooled_scores import pooled_scores
from longreach.ops.top_k import implementations as choosing
from longreach.ops.types import require

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class ModelShape:
    """What of a model a method's options may refer to. Heads are those of all ranks; head_dim is in channels.

    config: hash of the model's configuration, by which plans know their model; "" where nobody knows it.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    config: str = ""


@dataclass(frozen=True)
class LayerCall:
    """All that a method gets to see of one layer in one forward pass.

    layer: index; rows: post-RoPE queries [R, H, D]; kv: the layer's cache, the rows' own keys in it;
    slots: int [B], the cache slot of each sequence, by which state is addressed; scale, softcap, sink_logit:
    as in ops.attend; shard: which KV heads are here; impl: who computes; ran: who did.
    pre_rope: gives (q [R, H, D], k [R, G, D]) of the rows before rotation, for methods with `needs_pre_rope`.
    turn: gives how the rows were rotated, for those who undo it where they need it; likewise.
    phase: whether the rows belong to a prompt or are new tokens, for methods that treat them apart.
    ahead: tokens that are known to follow in later passes of the prompt, before any is decoded; padded sequences may
    get fewer.
    model: what the layer belongs to. passed: what earlier layers of this pass left for later ones (selections, by
    whatever key their method chooses); it is gone with the pass.
    """

    layer: int
    rows: Rows
    kv: KVView
    slots: Tensor
    scale: float
    softcap: float | None = None
    sink_logit: Tensor | None = None
    shard: HeadShard | None = None
    impl: str = "auto"
    pre_rope: Callable[[], tuple[Tensor, Tensor]] | None = field(default=None, repr=False)
    turn: Callable[[], Turn] | None = field(default=None, repr=False)
    phase: Phase = "decode"
    ahead: int = 0
    model: ModelShape | None = None
    passed: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    ran: set[str] = field(default_factory=set, repr=False, compare=False)

    def attend(self, selection: Selection, *, sink: bool = True) -> Partial:
        """ops.attend with this layer's logits. A method that merges several results takes the sink once."""
        sink_logit = self.sink_logit if sink else None
        name = resolve(self.impl, self.rows, self.kv, selection, softcap=self.softcap, sink_logit=sink_logit)
        self.ran.add(name)
        return attend(
            self.rows,
            self.kv,
            selection,
            scale=self.scale,
            softcap=self.softcap,
            sink_logit=sink_logit,
            impl=name,
        )

    def attend_keeping(self) -> tuple[Partial, Logits]:
        """ops.attend_keeping with this layer's logits: dense attention, the sink in it, and what it leaves."""
        impl = self._impl(keeping)
        terms: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sink_logit": self.sink_logit}
        return attend_keeping(self.rows, self.kv, **terms, impl=impl)

    def score_keys(self, keys: ScoringKeys | None = None) -> tuple[Tensor, Logits]:
        """ops.score_keys with this layer's logits: dense attention's lse [R, H], the sink in it, and what it leaves."""
        impl = self._impl(scoring)
        terms: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sink_logit": self.sink_logit}
        return score_keys(self.rows, self.kv, **terms, keys=keys, impl=impl)

    def attend_values(self, selection: Selection, logits: Logits, *, sink: bool = True) -> Partial:
        """ops.attend_values, from logits that a pass over this layer's keys has left. sink: as in `attend`."""
        sink_logit = self.sink_logit if sink else None
        impl = self._impl(valuing)
        return attend_values(self.rows, self.kv, selection, logits, sink_logit=sink_logit, impl=impl)

    def pooled_scores(self, lse: Tensor | None = None, *, logits: Logits | None = None) -> Tensor:
        """ops.pooled_scores with this layer's logits, or those that a pass has left: fp32 [R, G, N].

        What lies past the slots that a row reaches may be anything.
        """
        impl = self._impl(pooling)
        if impl == "triton" and logits is None:  # it sums logits that a pass over the keys has left
            found, logits = score_keys(self.rows, self.kv, scale=self.scale, softcap=self.softcap, impl=impl)
            lse = found if lse is None else lse
        terms: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        return pooled_scores(self.rows, self.kv, **terms, lse=lse, logits=logits, impl=impl)

    def top_k(
        self, x: Tensor, count: Tensor, length: Tensor, *, first: int = 0, last: int = 0, capacity: int
    ) -> tuple[Tensor, Tensor]:
        """ops.top_k: the largest scores of each row, as Lists takes them (index [L, heads, capacity], count)."""
        impl = self._impl(choosing)
        return top_k(x, count, length, first=first, last=last, capacity=capacity, impl=impl)

    def match(self, ring: Ring, rule: Rule, weight: Tensor | None = None) -> Matched:
        """ops.nearest.match of the rows, their rotation undone: the rows' own queries are in the ring from now on."""
        require(self.turn is not None, "this call does not know how its rows were rotated, and a match needs it")
        assert self.turn is not None
        impl = self._impl(matching)
        return match(self.rows, self.slots, ring, rule, turn=self.turn(), weight=weight, impl=impl)

    def attend_amend(
        self, selection: Selection, split: Bound, entries: Entries, take: Tensor, put: Tensor
    ) -> tuple[Partial, Tensor]:
        """ops.attend.attend_amend with this layer's logits, the sink among them."""
        impl = self._impl(amending)
        terms: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sink_logit": self.sink_logit}
        return attend_amend(self.rows, self.kv, selection, split, entries, take, put, **terms, impl=impl)

    def take(self, index: Tensor) -> LayerCall:
        """The call with the rows at `index` [r] alone."""
        turn = self.turn
        mine = None if turn is None else lambda: turn().take(index)
        return replace(self, rows=self.rows.take(index), turn=mine)

    def _impl(self, op: Implementations) -> str:
        """Who computes an op: `impl` where the op has it, else what "auto" means there."""
        name = op.resolve(self.impl if self.impl in op.names() else "auto", self.rows.q.device)
        self.ran.add(name)
        return name

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """x, pooled over the KV heads that are here, summed over the ranks that hold the others."""
        return x if self.shard is None else self.shard.sum(x)


class Reads(NamedTuple):
    """What a layer really read: each selection is one pass over the keys (or values) it names.

    metadata: further bytes per row [R] or for all rows (int) of what the method keeps between steps: page bounds,
    tables, rings, codes. The rule: what lies in memory when a pass begins, and is not needed for dense attention,
    counts each time it is read. So the ledger adds, for each pass over keys by lists, their entries in use and
    log-weights (8 bytes for an int64 entry: keep them in int32), as metadata. Not counted is what dense attention
    reads too (queries, lengths, block tables) and what an op makes and consumes itself (score rows on their way to
    a top-k, softmax statistics, results of split kernels).
    """

    keys: tuple[Selection, ...]
    values: tuple[Selection, ...]
    metadata: int | Tensor = 0


class Notes(NamedTuple):
    """What a method notes of rows for its report, added up over rows and passes on the device.

    tensors: [R, ...] each. columns: makes of them, one layer or more stacked before R, what is added up: float
    [L, R, H, C]. summary: makes of the sums, fp64 [H, C] on the host, and the number of rows what the report says, in
    values of JSON.
    """

    tensors: tuple[Tensor, ...]
    columns: Callable[..., Tensor]
    summary: Callable[[Tensor, int], dict[str, Any]]


class Outcome(NamedTuple):
    """What a method made of a layer. `dense_because`: why it attended densely, where it did and need not have.

    streams: int [R, G, 2], keys that each KV head reads for each row, and as many values, and bytes of metadata: what
    `reads` adds up to, where a kernel has counted it already.
    """

    partial: Partial
    reads: Reads
    dense_because: str | None = None
    notes: Notes | None = None
    streams: Tensor | None = None


@dataclass(frozen=True)
class AttentionMethod(ABC):
    """Base of methods that fill the prefill or decode slot. Subclasses are frozen dataclasses of options.

    follows: its state for decoding is made of the prompt's rows too, so `follow` is called as they are read.
    """

    name: ClassVar[str]
    phases: ClassVar[tuple[Phase, ...]]
    capture: ClassVar[Literal["full", "piecewise"]] = "full"
    needs_pre_rope: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    chunked_prefill_exact: ClassVar[bool] = True

    @abstractmethod
    def run(self, call: LayerCall, state: SequenceState | None) -> Outcome:
        """Attend for the rows of one layer."""

    def follow(self, call: LayerCall, state: SequenceState | None) -> tuple[Selection, ...]:
        """Take note of rows that the prefill method has attended for, in each layer that `run` will be called in.

        Called for methods that follow, once the rows' keys are in the cache. What `run` attends for it notes itself.
        Returns what it attended to for this, as `Reads` has it: each selection a pass over the call's rows, in which
        rows that were left out read nothing.
        """
        return ()

    def new_state(self, call: LayerCall, slots: int) -> SequenceState | None:
        """The state of one layer for `slots` sequences, made at its first call; None if there is none."""
        return None

    def check(self, model: ModelShape) -> None:  # noqa: B027 - most options fit every model
        """Raise InvalidInput where an option does not fit the model; asked before anything is attached or switched."""

    def to_json(self) -> dict[str, Any]:
        """{"name": ..., option: value}; `from_json` of the registry reads it back."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Option names and their defaults."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    @classmethod
    def make(cls, **options: Any) -> AttentionMethod:
        """The method with these options; an unknown one is an error that lists the known ones."""
        for key in options:
            if key not in cls.options():
                raise UnknownName(f"option of {cls.name}", key, cls.options())
        tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return cls(**tuples)


def state_of(method: AttentionMethod, cache: KVCache, call: LayerCall) -> SequenceState | None:
    """The state of `method` for the layer of `call`: made at its first call, kept by the cache, gone with it.

    Another config is another method: what it would remember differs.
    """
    place = (method, call.layer)
    if place not in cache.state:
        with torch.inference_mode(False):  # it outlives the mode this pass runs in
            fresh = method.new_state(call, len(cache.lengths))
        if fresh is None:
            return None
        cache.state[place] = fresh
    return cache.state[place]


def states_of(cache: KVCache, methods: Collection[AttentionMethod] = ()) -> list[SequenceState]:
    """The states that `state_of` made in a cache, of all layers. methods: whose, none for all."""
    found = list[SequenceState]()
    for place, state in cache.state.items():
        if not methods or (isinstance(place, tuple) and place[0] in methods):
            found.append(state)
    return found


def attend_densely(call: LayerCall, because: str | None = None) -> Outcome:
    """Exact attention over all that the rows can see."""
    everything = Spans.dense()
    return Outcome(call.attend(everything), Reads((everything,), (everything,)), because)


def budget(amount: int | float, length: Tensor) -> Tensor:
    """Keys that a budget means at each length: a count (int), or a fraction of the length (float), at least 1."""
    if isinstance(amount, int):
        return torch.full_like(length, amount).minimum(length)
    # the fraction as the caller wrote it: 0.1 * 30 must be 3, not 3.0000000000000004 rounded up
    return torch.ceil(amount * length.double() - 1e-9).long().clamp(min=1).minimum(length)


def is_count(value: object, least: int = 0) -> bool:
    """Whether `value` is an int (True is none) of at least `least` that a 32-bit index can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def check_budget(name: str, amount: int | float) -> None:
    """Raise InvalidInput unless `amount` is a count >= 1 or a fraction in (0, 1]."""
    count = is_count(amount, 1)
    share = isinstance(amount, float) and 0.0 < amount <= 1.0
    require(count or share, f"{name}: expected a count (int >= 1) or a fraction (float in (0, 1]), got {amount!r}")
