"""One forward pass: in each layer methods attend for its rows, observers get them, and reads are counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from longreach.cache import SequenceState
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import Configured, Outcome, PromptObserver, is_count
from longreach.methods.call import LayerCall, ModelShape, Phase
from longreach.ops import KVView, Partial, Rows, Selection, Spans
from longreach.ops.doors import EVERYTHING, Read
from longreach.ops.types import describe, require
from longreach.runtime.ledger import Ledger
from longreach.runtime.segments import Segment, check_runs, check_segments
from longreach.runtime.state import StateStore

LayerHook = Callable[[Phase, LayerCall, Outcome], None]


class OwnAttention(Protocol):
    """Attention that a layer of the model defines itself. name: in reports; None: the method's."""

    @property
    def name(self) -> str | None: ...

    def __call__(self, call: LayerCall, run: Callable[[], Outcome]) -> Outcome:
        """The layer's result. run: runs the method on the call; it may be called once, or not at all."""


class States(Protocol):
    """Provides the state of a method in a layer."""

    def get(self, method: PromptObserver, call: LayerCall) -> SequenceState | None: ...


@dataclass
class Pass:
    """One forward pass over the layers of a model.

    segments: the methods and their rows; together they cover all rows of the pass, each once. Methods must fit `model`.
    states: state of methods; None for a pass without a cache, whose methods get fresh state.
    ledger: counts reads; None for a pass that is not counted. impl: implementation of ops, or "auto".
    on_layer: called after each layer and segment. prompt_tokens_left: as in LayerCall.
    shared: values that layers leave for later layers. layers: those that have attended.
    reads_of: the method for which the pass is made, to choose tokens by it: its reads count as that method's, beside
    those of the pass that puts the prompt into the cache. None for any other pass.
    """

    segments: tuple[Segment, ...]
    model: ModelShape | None = None
    states: States | None = None
    ledger: Ledger | None = None
    impl: str = "auto"
    on_layer: LayerHook | None = None
    prompt_tokens_left: int = 0
    shared: dict[Hashable, Any] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)
    reads_of: Configured | None = None

    def __post_init__(self) -> None:
        require(len(self.segments) > 0, "segments: expected at least one")
        if self.model is not None:
            for segment in self.segments:
                segment.check(self.model)

    def restart(self) -> None:
        """Forget what layers left, for a step that is recorded once and runs again."""
        self.shared.clear()
        self.layers.clear()

    @property
    def observes_tokens(self) -> bool:
        """Whether an observer keeps numbers for each key."""
        return any(observer.keeps == "tokens" for segment in self.segments for observer in segment.observers)

    def call(self, layer: int, rows: Rows, kv: KVView, slots: Tensor, scale: float, **terms: Any) -> LayerCall:
        """The call of one layer in this pass; terms: further fields of LayerCall."""
        return LayerCall(
            layer, rows, kv, slots, scale, impl=self.impl, phase=self.segments[0].phase,
            prompt_tokens_left=self.prompt_tokens_left, model=self.model, shared=self.shared, **terms,
        )  # fmt: skip


def attend_layer(
    p: Pass, call: LayerCall, *, window: int | None = None, written: LayerCall | None = None,
    around: OwnAttention | None = None,
) -> Outcome:  # fmt: skip
    """Attention of all rows of one layer, in the order of the rows. Keys and values must be in the cache.

    window: the layer's sliding window in tokens, else None. With a window every method attends densely within it, and
        a cache whose state is the pass's StateStore evicts no keys of the layer.
    written: rows for all tokens whose keys the pass has written, if these are more than the rows of the call. Observers
        that keep numbers for each key get them; their queries are zeros.
    around: the layer's own attention, around the method's or in its place; only in passes of one segment.
    With several segments the Outcome has no notes; the ledger has them.
    Raises Unsupported for a window in a layer with evicted keys, and errors of the methods. Raises InvalidInput for a
    layer that has attended in this pass already, for segments that are not the rows of the pass (see `check_segments`:
    on a GPU the caller answers for the values of an index), and for a method that has missed tokens (see
    `StateStore.get`).
    """
    _enter(p, call, window)
    if len(p.segments) == 1 and p.segments[0].index is None:
        return _attend_segment(p, p.segments[0], call, window, written, around)
    assert around is None, "attention of the layer's own, in a pass of several segments"
    assert written is None, "more rows written than run, in a pass of several segments"
    return _joined(p, call, window)


def note_attended(p: Pass, call: LayerCall, impl: str, *, window: int | None = None) -> None:
    """Observe and count rows of a layer that an engine's own kernels have attended for, densely or within a window.

    For a pass of one segment, whose method must be `dense`. impl: the kernels' name, for reports. `on_layer` is not
    called, as there is no result here. Raises what `attend_layer` raises.
    """
    (segment,) = p.segments
    require(segment.method.name == "dense", lambda: f"method: expected dense, got {segment.method.name}")
    _enter(p, call, window)
    dense = EVERYTHING if window is None else Spans.window(window)
    call.meter.kernels_used.add(impl)
    call.count_read(Read.of(call.kv, dense))
    none = Partial.empty(0, *call.rows.q.shape[1:], device=call.rows.q.device)
    _observe(p, segment, call, window)
    _count(p, segment, call, "dense", Outcome(none, None if window is None else _within(window)), dense)


def _enter(p: Pass, call: LayerCall, window: int | None) -> None:
    """Check the call of a layer that has not attended in this pass, and note that it has."""
    ok = window is None or is_count(window, 1)
    require(ok, lambda: f"window: layer {call.layer}: expected a count of tokens >= 1, or None, got {window!r}")
    require(
        call.layer not in p.layers,
        lambda: (
            f"layer {call.layer} has attended in this pass already; make a Pass for each forward pass, and one call "
            f"for all rows of a layer"
        ),
    )
    if window is not None and call.evicted:
        raise Unsupported(
            f"layer {call.layer} attends to a window of {window} tokens, and keys of it were dropped: slots are not "
            f"positions there; keep all keys of sliding-window layers"
        )
    if window is not None and isinstance(p.states, StateStore):
        p.states.note_window(call.layer, window)
    if not p.layers:
        check_segments(p.segments, call.rows, len(call.slots))
    p.layers.add(call.layer)


def _joined(p: Pass, call: LayerCall, window: int | None) -> Outcome:
    out: Tensor | None = None
    lse: Tensor | None = None
    for number, segment in enumerate(p.segments):
        assert segment.index is not None
        some, shared = call.take(segment.index).observer(), p.shared.setdefault(("segment", number), {})
        # one tensor of positions for all layers with rows in the same slots, so that LayerCall.once can hit
        key = ("segment's rows", number, id(call.rows.pos))
        if key not in p.shared:
            check_runs(number, segment, some.rows)
            p.shared[key] = call.rows.pos, some.rows.seq, some.rows.pos
        _, seq, pos = p.shared[key]
        rows = replace(some.rows, seq=seq, pos=pos, runs=segment.runs)
        some = replace(some, rows=rows, phase=segment.phase, shared=shared)
        partial = _attend_segment(p, segment, some, window).partial
        if out is None or lse is None:
            out = partial.out.new_empty((call.rows.q.shape[0], *partial.out.shape[1:]))
            lse = partial.lse.new_empty(out.shape[:2])
        out[segment.index], lse[segment.index] = partial.out, partial.lse
    assert out is not None and lse is not None
    return Outcome(Partial(out, lse))


def _attend_segment(
    p: Pass, segment: Segment, call: LayerCall, window: int | None, written: LayerCall | None = None,
    around: OwnAttention | None = None,
) -> Outcome:  # fmt: skip
    if window is None:
        dense, method = EVERYTHING, segment.method.name

        def run() -> Outcome:
            found = segment.method.run(call, _state(p, segment.method, call))
            if not isinstance(found, Outcome):
                raise InvalidInput(
                    f"{method}: run must return an Outcome, such as Outcome(call.attend(...)), got {describe(found)}"
                )
            return found

        outcome = run() if around is None else around(call, run)
        method = method if around is None else around.name or method
    else:
        dense, method = Spans.window(window), "dense"
        outcome = Outcome(call.attend(dense), _within(window))
    _observe(p, segment, call, window, written)
    _count(p, segment, call, method, outcome, dense)
    if p.on_layer is not None:
        p.on_layer(segment.phase, call, outcome)
    return outcome


def _within(window: int) -> str:
    return f"sliding window of {window}"


def _observe(p: Pass, segment: Segment, call: LayerCall, window: int | None, written: LayerCall | None = None) -> None:
    """Give the rows to the segment's observers."""
    for observer in segment.observers:
        own = (call if written is None or observer.keeps != "tokens" else written).observer()
        if window is None and p.states is not None:  # without a cache nothing is ever decoded
            observer.observe_prompt(own, _state(p, observer, own))
        if p.ledger is not None:
            p.ledger.add_observer(segment.phase, own, observer)


def _count(p: Pass, segment: Segment, call: LayerCall, method: str, outcome: Outcome, dense: Selection) -> None:
    """Add the layer to the pass's ledger."""
    if p.ledger is not None and p.reads_of is not None:
        p.ledger.add_observer(segment.phase, call, p.reads_of)
    elif p.ledger is not None:
        p.ledger.add(segment.phase, call, method, outcome, dense)


def _state(p: Pass, method: PromptObserver, call: LayerCall) -> SequenceState | None:
    return method.new_state(call, len(call.slots)) if p.states is None else p.states.get(method, call)


@torch.no_grad()
def drive(
    p: Pass, calls: Iterable[LayerCall], *, windows: Mapping[int, int] | None = None
) -> list[tuple[LayerCall, Outcome]]:
    """Run a pass over the given calls of its layers, in order, and commit its ledger. No model is needed.

    calls: may be a generator that appends a layer's keys first. windows: layer -> sliding window. If a layer raises,
    nothing of the pass is counted.
    """
    done = list[tuple[LayerCall, Outcome]]()
    try:
        for call in calls:
            done.append((call, attend_layer(p, call, window=(windows or {}).get(call.layer))))
    except BaseException:
        if p.ledger is not None:
            p.ledger.abandon()
        raise
    if p.ledger is not None:
        p.ledger.commit()
    return done
