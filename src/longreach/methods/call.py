"""One layer in one forward pass, as methods get it. The call attends, runs ops, and counts their reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from longreach.errors import InvalidInput, Unsupported
from longreach.ops import HeadShard, KVView, Partial, RotaryAngles, RotaryFrequencies, Rows, Selection, Spans
from longreach.ops.attend import prepare, resolve
from longreach.ops.checks import Once
from longreach.ops.doors import Op, Read, op_named
from longreach.ops.types import INTS, describe, require
from longreach.plans import Plan

Phase = Literal["prefill", "decode"]
T = TypeVar("T")


class SessionPlans(Protocol):
    """Plans that a session finds or makes for methods without one (`methods.automatic`)."""

    def get(self, kind: str) -> Plan | None:
        """The plan of a kind, None as long as there is none."""

    def reason(self, kind: str) -> str:
        """Why there is no plan of a kind, for reports."""


@dataclass(frozen=True)
class ModelShape:
    """The facts about a model that a method's options may refer to. Heads are those of all ranks.

    config: hash of the model's configuration, by which plans are matched to models; "" if unknown.
    values_in_keys: the values are the keys themselves, held once (MLA's latent cache); see KVView.
    by_layer: (KV heads, head dim) of each layer, where those with a sliding window have others than kv_heads and
        head_dim, which are of the other layers; () where all layers are alike. Methods attend in the latter alone.
    plans: those that the session makes itself; None where none can be made.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    config: str = ""
    values_in_keys: bool = False
    by_layer: tuple[tuple[int, int], ...] = ()
    plans: SessionPlans | None = field(default=None, compare=False, repr=False)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """(KV heads, head dim) of a layer."""
        return self.by_layer[layer] if self.by_layer else (self.kv_heads, self.head_dim)

    @property
    def token_numbers(self) -> int:
        """Numbers that the KV cache of all layers holds for a token."""
        vectors = sum(heads * dim for heads, dim in map(self.heads_of, range(self.layers)))
        return vectors if self.values_in_keys else 2 * vectors

    @property
    def largest(self) -> tuple[int, int]:
        """The most query heads that share a KV head, and the largest head dim."""
        shapes = self.by_layer or ((self.kv_heads, self.head_dim),)
        return max(self.query_heads // heads for heads, _ in shapes), max(dim for _, dim in shapes)


class Evictable(Protocol):
    """A method that declares whether it can decode after eviction."""

    @property
    def name(self) -> str: ...

    def eviction_refusal(self) -> str | None: ...


class Prepared(NamedTuple):
    """A prepared attention and its arguments."""

    selection: Selection
    kv: KVView
    sink: bool
    impl: str
    run: Callable[[], Partial]


class Noted(NamedTuple):
    """A read with its rows and view. part: the rows' numbers in the pass, None for all."""

    rows: Rows
    kv: KVView
    part: Tensor | None
    read: Read


class Meter:
    """Reads of the calls of one layer, in order, and the implementations that ran."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self.kernels_used: set[str] = set()

    @property
    def keys(self) -> tuple[Selection, ...]:
        """The selections whose keys were read, one for each pass."""
        return self._selections("key_bytes")

    @property
    def values(self) -> tuple[Selection, ...]:
        """The selections whose values were read, one for each pass."""
        return self._selections("value_bytes")

    def _selections(self, column: str) -> tuple[Selection, ...]:
        reads = (noted.read for noted in self.noted)
        return tuple(r.selection for r in reads if r.selection is not None and getattr(r, column))


@dataclass(frozen=True)
class LayerCall:
    """One layer in one forward pass: a method's input, and the meter of its reads.

    layer: index. rows: post-RoPE queries [R, H, D]; `rows.pos` is the slot of a row's own key in this layer.
    kv: the layer's keys and values, those of the rows included. slots: int [B], the cache slot of each sequence, which
        addresses per-sequence state.
    scale, softcap, sink_logit: as in ops.attend. shard: the KV heads of this rank. impl: who computes.
    pre_rope: returns (q [R, H, D], k [R, G, D]) of the rows before rotation, for methods with `needs_pre_rope`.
    rotary: returns the angles by which the rows were rotated, for the same methods.
    frequencies: returns the frequencies of the model's rotation, for methods with `needs_frequencies`; a device sync at
        a layer's first call.
    phase: whether the rows belong to a prompt or are new tokens.
    prompt_tokens_left: tokens of the prompt that later passes are known to bring; padded sequences may get fewer.
    evicted: whether keys of this layer were dropped, so that slots are not positions.
    model: the shape of the layer's model. shared: values that layers leave for later layers of the same pass.
    meter: counts the reads of this call and of the calls taken from it. index: the rows' numbers in the pass.
    prepared: the last attention over spans, reused by a step that attends again over the same tensors.
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
    rotary: Callable[[], RotaryAngles] | None = field(default=None, repr=False)
    frequencies: Callable[[], RotaryFrequencies] | None = field(default=None, repr=False)
    phase: Phase = "decode"
    prompt_tokens_left: int = 0
    evicted: bool = False
    model: ModelShape | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    index: Tensor | None = field(default=None, repr=False, compare=False)
    prepared: list[Prepared] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kv.slot_pos is not None:
            raise Unsupported(
                "kv: a layer is read in the order of its slots, and this view has other positions (slot_pos); "
                "compact the kept entries, so that slots ascend with positions, and leave slot_pos out"
            )

    def attend(self, selection: Selection, *, kv: KVView | None = None, sink: bool = True) -> Partial:
        """ops.attend with this layer's logits. A method that merges several results takes the sink once.

        kv: another view than the layer's, on the same device: other memory of the same KV heads and sequences.
        Raises InvalidInput for another view than that, and what ops.attend raises.
        """
        last = self.prepared[0] if self.prepared and kv is None else None
        if last is None or last.selection is not selection or last.sink is not sink:
            last = self._prepare(selection, self._memory(kv), sink)
            if kv is None and isinstance(selection, Spans):  # lists may be copied to prepare them
                self.prepared[:] = [last]
        partial = last.run()
        self.meter.kernels_used.add(last.impl)
        self._note(last.kv, Read.of(last.kv, selection))
        return partial

    def _prepare(self, selection: Selection, kv: KVView, sink: bool) -> Prepared:
        logits: dict[str, Any] = {"softcap": self.softcap, "sink_logit": self.sink_logit if sink else None}
        once = self._over(kv)
        impl = self._resolved(selection, kv, logits, once)
        run = prepare(self.rows, kv, selection, scale=self.scale, impl=impl, once=once, **logits)
        return Prepared(selection, kv, sink, impl, run)

    def _resolved(self, selection: Selection, kv: KVView, logits: dict[str, Any], once: Once) -> str:
        """The implementation that attends, found once for layers that differ in no more than the tensors' contents."""
        if torch.is_grad_enabled() or not isinstance(selection, Spans):
            return resolve(self.impl, self.rows, kv, selection, **logits)
        form = tuple(x is None for x in logits.values())
        key = ("impl", self.impl, id(selection), self.rows.q.dtype, self.rows.q.shape, kv.heads, id(kv.calls), *form)
        found = once(key, lambda: (resolve(self.impl, self.rows, kv, selection, **logits), selection, kv.calls))
        return found[0]

    def op(
        self,
        name: str,
        *args: Any,
        kv: KVView | None = None,
        rows: Rows | None = None,
        counted: Tensor | int | None = None,
        metadata: bool = False,
        **given: Any,
    ) -> Any:
        """The result of an op of longreach.ops, given this layer's rows, view and logit terms as far as it takes them.

        args, given: the op's other arguments. kv, rows: instead of the layer's. counted: int [R, G], the slots that
        each KV head reads, if a kernel has counted them already; a number: all of them, if the host knows.
        metadata: `kv` holds the method's own numbers rather than keys and values, and counts as metadata.
        Raises UnknownName for an unknown op, InvalidInput for a view on another device, and what the op raises.
        """
        op, kv = op_named(name), self._view(kv)
        rows = rows or self.rows
        first = {"rows": rows, "kv": kv, "slots": self.slots}
        places = [first[term] for term in op.layer if term in first]
        terms = {term: self._term(term) for term in op.layer if term not in first}
        impl = self._chosen(op, *places, *args, *terms.values(), *given.values())
        result = op.run(*places, *args, **{**terms, **given}, impl=impl)
        self.meter.kernels_used.add(impl)
        for read in op.reads(rows, kv, result, *args, **given):
            if metadata:
                total = read.key_bytes + read.value_bytes + read.metadata_bytes
                read = read._replace(key_bytes=0, value_bytes=0, metadata_bytes=total)
            self._note(kv, read if counted is None else read._replace(counted=counted))
        return result

    def read_bytes(self, amount: int | Tensor) -> None:
        """Count metadata that no op of the call reads: bytes of each row, int [R] or [R, ...] to be summed over a row,
        or of all rows together (int). Raises InvalidInput."""
        rows = self.rows.pos.shape
        if isinstance(amount, Tensor):
            ok = amount.dtype in INTS and amount.shape[:1] == rows
            require(ok, lambda: f"amount: expected int [R={rows[0]}] or [R, ...], got {describe(amount)}")
        else:
            ok = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
            require(ok, lambda: f"amount: expected bytes, an int >= 0 or int [R={rows[0]}], got {amount!r}")
        self._note(self.kv, Read(other=amount))

    def count_read(self, read: Read, *, kv: KVView | None = None) -> None:
        """Count a pass over the layer's view, or another one, that no op of the call counts."""
        self._note(self._view(kv), read)

    def take(self, index: Tensor) -> LayerCall:
        """The call for the rows at `index` [r]. It counts into the same meter."""
        rotary = self.rotary
        mine = None if rotary is None else lambda: rotary().take(index)
        own = index if self.index is None else self.index[index]
        return replace(self, rows=self.rows.take(index), rotary=mine, index=own)

    def observer(self) -> LayerCall:
        """The same call with a meter of its own."""
        other = object.__new__(LayerCall)  # `replace` takes ten times as long, in every layer of every step
        other.__dict__.update(self.__dict__, meter=Meter())
        return other

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, computed once for all layers of the pass whose rows lie in the same slots."""
        place = ("once", key, id(self.rows.pos), id(self.kv.seq_lens))
        if place not in self.shared:
            self.shared[place] = (make(), self.rows.pos, self.kv.seq_lens)  # an id is unique while its object lives
        return self.shared[place][0]

    def _over(self, kv: KVView) -> Once:
        """Computes values once for all layers of the pass whose rows and views share these tensors."""
        parts = (self.rows.seq, self.rows.pos, kv.seq_lens, kv.block_table)
        ids, shared = tuple(map(id, parts)), self.shared

        def once(key: Hashable, make: Callable[[], T]) -> T:
            place = ("over", key, *ids)
            if place not in shared:
                shared[place] = (make(), parts)  # an id is unique while its object lives
            return shared[place][0]

        return once

    @property
    def context(self) -> Tensor:
        """int64 [R]: the slots visible to each row."""
        return self.once("context", lambda: self.rows.pos.long() + 1)

    def angles(self) -> RotaryAngles:
        """The angles by which the rows were rotated. Raises InvalidInput for a call without `rotary`."""
        if self.rotary is None:
            raise InvalidInput(
                "LayerCall.rotary is required: the method needs the rotation of the rows; pass a function"
            )
        return self.rotary()

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """x, pooled over this rank's KV heads, summed over all ranks."""
        return x if self.shard is None else self.shard.sum(x)

    def refuse_evicted(self, method: Evictable) -> None:
        """Raise Unsupported if keys of this layer were evicted and the method cannot decode then."""
        why = method.eviction_refusal() if self.evicted else None
        if why is not None:
            raise Unsupported(f"{method.name}: {why}; decode with another method, or do not evict")

    def _view(self, kv: KVView | None) -> KVView:
        if kv is None:
            return self.kv
        require(isinstance(kv, KVView), lambda: f"kv: expected a KVView, got {describe(kv)}")
        on = kv.k.device == self.rows.q.device
        require(on, f"kv: expected a view on {self.rows.q.device} like the rows, got {describe(kv.k)}")
        return kv

    def _memory(self, kv: KVView | None) -> KVView:
        """A view that the rows may attend to."""
        if kv is None:
            return self.kv
        kv, own = self._view(kv), self.kv
        require(
            (kv.heads, kv.sequences) == (own.heads, own.sequences),
            lambda: (
                f"kv: expected a view of {own.heads} KV heads and {own.sequences} sequences like the layer's, got "
                f"{kv.heads} and {kv.sequences}"
            ),
        )
        return kv

    def computes(self, name: str, impl: str) -> bool:
        """Whether `impl` would compute an op of this call."""
        op = op_named(name)
        return self._chosen(op, self.rows, self.kv) == impl

    def _chosen(self, op: Op, *given: Any) -> str:
        """The implementation that computes an op of these arguments."""
        named = self.impl in op.implementations.paths and self.impl != "numba"  # which takes no 8-bit copy of keys, say
        impl = self.impl if named else "auto"
        return op.implementations.choose(impl, self.rows.q.device, *given)

    def _term(self, name: str) -> Any:
        return self.angles() if name == "rotary" else getattr(self, name)

    def _note(self, kv: KVView, read: Read) -> None:
        self.meter.noted.append(Noted(self.rows, kv, self.index, read))
