"""State of methods by method and layer, and the prompt tokens that each method has observed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from longreach.cache import PerTokenState, SequenceState
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.automatic import AwaitsPlan
from longreach.methods.base import PromptObserver
from longreach.methods.call import LayerCall
from longreach.ops import KVView

Place = tuple[PromptObserver, int]  # a method and a layer


class StateStore:
    """A SequenceState made of the states of all methods and layers, for `slots` sequences.

    Pass it to `KVCache(state=...)`, which then resets, truncates and rebuilds states together with their keys. An
    engine with its own memory calls the same methods. States end with the store.

    shared_pages: whether sequences may share pages of keys, as prefix caches let them; KVCache never does. State of
        blocks of keys is then refused where blocks do not divide pages: a block that reaches past a shared page would
        describe the keys of one sequence to the other.
    all_observed: whether the engine lets every method observe every token before it decodes, so that no call has to be
        checked for it. KVCache records what each method has observed (`mark_observed`).
    """

    def __init__(self, slots: int, *, shared_pages: bool = False, all_observed: bool = False):
        self.slots, self.shared_pages, self.all_observed = slots, shared_pages, all_observed
        self._states: dict[Place, SequenceState | None] = {}
        self._generation = 0  # of states that were dropped
        self._observed: dict[PromptObserver, list[int]] = {}
        self._windows: dict[int, int] = {}  # layer -> its sliding window
        self._restored = False  # whether keys came from a file, of which new states are made
        self._model: dict[Hashable, SequenceState] = {}

    def get(self, method: PromptObserver, call: LayerCall) -> SequenceState | None:
        """The state of `method` for the layer of `call`, made at its first call.

        Another config counts as another method, as its state would differ.
        Raises InvalidInput if a method that observes prompts decodes rows after tokens that it has not observed. The
        number of tokens before a row comes from `rows.runs`, or on a CPU from `rows.pos`; with neither there is no
        check. After eviction both count the kept slots only. `slots` on another device is not read, as that would be a
        sync: there it is enough that the method has observed as many tokens of some sequence.
        Raises Unsupported where pages may be shared and the method's blocks of keys do not divide them.
        """
        if call.phase == "decode" and method.observes_prompt and not self.all_observed:
            key = ("observed", id(method), id(call.rows.pos))  # once a pass, for layers with rows in the same slots
            if key not in call.shared:
                self._check_call(method, call)
                call.shared[key] = method, call.rows.pos  # an id is unique while its object lives
        place = (method, call.layer)
        if place not in self._states:
            made = self._states[place] = self._new(method, call)
            if self._restored and made is not None:
                made.kept(call.layer, call.kv)
        waiting = self._states[place]
        if isinstance(waiting, AwaitsPlan) and waiting.ready:
            state = self._states[place] = self._new(method, call)
            self._generation += waiting.generation
            if state is not None:
                state.kept(call.layer, call.kv)  # the keys that came before the plan
        return self._states[place]

    def _new(self, method: PromptObserver, call: LayerCall) -> SequenceState | None:
        with torch.inference_mode(False):  # it outlives the mode this pass runs in
            state = method.new_state(call, self.slots)
        if self.shared_pages:
            check_blocks(method, state, call.kv)
        return state

    def of_model(self, name: Hashable, make: Callable[[], SequenceState]) -> SequenceState:
        """A state of the model itself rather than of a method, made by `make` when it is first asked for.

        It changes in every pass, whatever methods attend. So it is part of every snapshot. Its keys may not be evicted
        or overwritten.
        """
        if name not in self._model:
            with torch.inference_mode(False):
                self._model[name] = make()
        return self._model[name]

    def has_model(self, name: Hashable) -> bool:
        """Whether `of_model` has made this state."""
        return name in self._model

    def states(self, methods: Collection[PromptObserver] = (), layer: int | None = None) -> list[SequenceState]:
        """All states of methods, or those of some methods, or of a layer. Not the model's."""
        return [
            state
            for (method, number), state in self._states.items()
            if state is not None and (not methods or method in methods) and layer in (None, number)
        ]

    def _all(self) -> list[SequenceState]:
        """All states, the model's included."""
        return [*self.states(), *self._model.values()]

    def drop(self, method: PromptObserver, layer: int | None = None) -> None:
        """Forget the state of a method in a layer; None: in all layers, and what it has observed."""
        for place in [p for p in self._states if p[0] == method and layer in (None, p[1])]:
            del self._states[place]
        if layer is None:
            self._observed.pop(method, None)

    @property
    def places(self) -> frozenset[Place]:
        """The methods and layers that have state, to be passed to `drop_since`."""
        return frozenset(self._states)

    def drop_since(self, before: Collection[Place]) -> None:
        """Forget states that were made since `places` returned `before`."""
        for place in self.places.difference(before):
            state = self._states.pop(place)
            self._generation += 0 if state is None else state.generation + 1

    # what a method has observed

    def mark_observed(self, methods: Collection[PromptObserver], slots: Sequence[int], before: Sequence[int],
                      after: Sequence[int]) -> None:  # fmt: skip
        """Record that these methods observed tokens [before[b], after[b]) of the sequence in slots[b].

        For a pass that overwrote tokens, before[b] is the first one that it overwrote if it had a row for each token
        from there on, else the length before the pass.
        """
        for method in methods:
            if method.observes_prompt:
                self._observed.setdefault(method, [0] * self.slots)
        for method, upto in self._observed.items():
            for slot, start, end in zip(slots, before, after, strict=True):
                if end > start:
                    upto[slot] = end if method in methods and upto[slot] >= start else min(upto[slot], start)

    def check_observed(self, method: PromptObserver, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise InvalidInput if a method that observes prompts has missed tokens of these sequences."""
        if not method.observes_prompt:
            return
        upto = self._observed.get(method, [0] * self.slots)
        for slot, held in zip(slots, lengths, strict=True):
            if upto[slot] < held:
                raise InvalidInput(
                    f"{method.name} decodes with state that it makes of the prompt, and this cache holds {held} tokens "
                    f"of which it observed the first {upto[slot]} only; attach with it (session.prepare for methods to "
                    f"switch to; without a session: Segment.observers, then mark_observed) before the prompt is read"
                )

    def observed(self, method: PromptObserver) -> list[int]:
        """How many tokens of each sequence a method has observed."""
        return list(self._observed.get(method, [0] * self.slots))

    def note_restored(self, observed: Mapping[PromptObserver, Sequence[int]]) -> None:
        """Keys were put into the cache without a pass, and these methods had observed so many tokens of each sequence.

        States that are made from now on are made of the keys in the cache.
        """
        self._restored = True
        self._observed |= {method: list(upto) for method, upto in observed.items()}

    def _check_call(self, method: PromptObserver, call: LayerCall) -> None:
        """Raise InvalidInput if the method has missed tokens before the first row of a sequence of the call."""
        rows, on_host, firsts = call.rows, call.slots.device.type == "cpu", list[tuple[int, int]]()
        if rows.runs is not None:
            firsts = [(run.seq, run.first) for run in rows.runs if run.first is not None and run.rows]
        elif on_host:
            firsts = list(zip(rows.seq.tolist(), rows.pos.tolist(), strict=True))
        first = dict(sorted(firsts, reverse=True))  # the least of each sequence, as it comes last
        if on_host:
            each = call.slots.tolist()
            self.check_observed(method, [each[seq] for seq in first], list(first.values()))
        elif first:
            observed = self._observed.get(method, [0])
            self.check_observed(method, [observed.index(max(observed))], [max(first.values())])

    # SequenceState

    def reset(self, slots: Tensor) -> None:
        for state in self._all():
            state.reset(slots)
        self._unobserve(slots, [0] * len(slots))

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        for state in self._all():
            state.check_truncate(slots, lengths)

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        for state in self._all():
            state.truncate(slots, lengths)
        self._unobserve(slots, lengths.tolist() if self._observed else [])

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        """State of sequences is cut, and the rest counts as not observed. State of tokens follows in `written`."""
        for state in self._all():
            state.overwrite(slots, lengths)
        cut = [method for method in self._observed if method.keeps == "sequences"]
        self._unobserve(slots, lengths.tolist() if cut else [], cut)

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        for state in self.states(layer=layer):
            state.written(layer, view, seq, slot)

    def _unobserve(
        self, slots: Tensor, lengths: Sequence[int], methods: Collection[PromptObserver] | None = None
    ) -> None:
        """Tokens past these lengths no longer count as observed, by some methods or by all."""
        for method in self._observed if methods is None else methods:
            upto = self._observed[method]
            for slot, length in zip(slots.tolist(), lengths, strict=True):
                upto[slot] = min(upto[slot], length)

    def note_window(self, layer: int, window: int) -> None:
        """Record that a layer attends within a sliding window. `KVCache.keep` then refuses to evict keys of it."""
        self._windows[layer] = window

    def check_keep(self, layer: int) -> None:
        if layer in self._windows:
            raise Unsupported(
                f"layer {layer} attends to a sliding window of {self._windows[layer]} tokens, and slots are not "
                f"positions after eviction; keep all keys of sliding-window layers"
            )
        for state in self.states(layer=layer):
            state.check_keep(layer)

    def kept(self, layer: int, view: KVView) -> None:
        for state in self.states(layer=layer):
            state.kept(layer, view)

    def snapshot(self, methods: Collection[PromptObserver] = ()) -> Callable[[], None]:
        """Copy state that truncation cannot restore; the result restores it.

        methods: of these only and of the model, () for all.
        """
        restores = [state.snapshot() for state in (*self.states(methods), *self._model.values())]

        def restore() -> None:
            for one in restores:
                one()

        return restore

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> StateStore:
        """A store of the sequences in `slots`, in this order. Raises Unsupported, naming what cannot be copied."""
        order = slots.tolist()
        new = StateStore(len(order), shared_pages=self.shared_pages, all_observed=self.all_observed)
        for place, state in self._states.items():
            method, layer = place
            with _named(method.name):
                new._states[place] = None if state is None else state.select(slots, pages[layer : layer + 1])
        for name, held in self._model.items():  # layers of these keep all keys, so all have the same pages
            new._model[name] = held.select(slots, pages[:1])
        new._observed = {method: [upto[s] for s in order] for method, upto in self._observed.items()}
        new._windows, new._restored = dict(self._windows), self._restored
        return new

    def to_save(self) -> dict[str, Tensor]:
        """Tensors by `saved_name`. Raises Unsupported, naming what cannot be saved."""
        found = dict[str, Tensor]()
        for (method, layer), state in self._states.items():
            with _named(method.name):
                held = {} if state is None else state.to_save()
            found |= {saved_name(method, layer, name): x for name, x in held.items()}
        for state in self._model.values():
            found |= state.to_save()
        return found

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Fill the states that there are; others are ignored."""
        for (method, layer), state in self._states.items():
            start = saved_name(method, layer, "")
            mine = {name.removeprefix(start): x for name, x in saved.items() if name.startswith(start)}
            if state is not None and mine:
                state.restore(mine)

    @property
    def generation(self) -> int:
        return self._generation + sum(state.generation for state in self._all())

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._all())


def saved_name(method: PromptObserver, layer: int, name: str) -> str:
    """What a tensor of a method's state is called in a file."""
    return f"{method!r}/{layer}/{name}"


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Refusals within this block name the method."""
    try:
        yield
    except Unsupported as refusal:
        raise Unsupported(f"{name}: {refusal}") from refusal


def check_blocks(method: PromptObserver, state: SequenceState | None, kv: KVView) -> None:
    """Raise Unsupported for state of blocks that reach past a page of a block table."""
    if kv.block_table is not None and isinstance(state, PerTokenState) and kv.page % state.per:
        raise Unsupported(
            f"{method.name} keeps state for blocks of {state.per} keys, and sequences may share pages of {kv.page} "
            f"slots: expected blocks that divide a page. Give the method smaller blocks, use pages of a multiple of "
            f"{state.per} slots, or share no pages (StateStore(shared_pages=False))"
        )
