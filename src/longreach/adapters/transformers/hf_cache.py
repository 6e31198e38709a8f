"""longreach's KV cache with the interface of a transformers cache.

transformers counts padded columns; the memory below holds real tokens only, so a left-padded batch is ragged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from longreach.adapters.transformers.cache_name import CACHE
from longreach.adapters.transformers.latent import joined
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.recurrent import RecurrentState
from longreach.adapters.transformers.step import Step, current
from longreach.cache import CacheConfig, HostAttend, KVCache, selected
from longreach.errors import ConcurrentUse, InvalidInput, LongreachError, Unsupported
from longreach.methods.base import AttentionMethod, PromptObserver, is_count
from longreach.methods.call import Meter
from longreach.methods.slots import Eviction, LastRows
from longreach.ops.types import describe
from longreach.runtime import Ledger, StateStore


def _refuse(what: str) -> None:
    raise Unsupported(f"{what} is not supported on a model with longreach attached; use greedy search or sampling")


class _Layer(CacheLayerMixin):
    """One layer's interface for transformers; the memory is the shared cache's."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: LongreachCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        step = current()
        if step.cache is not self.cache:
            raise InvalidInput(f"a cache of another session was passed as {CACHE}; use session.new_cache()")
        step.written[self.index] = (key_states, value_states)
        if step.facts.latent:  # two parts of one vector
            k = v = step.rows(joined(key_states, value_states))
        else:
            k, v = step.rows(key_states), step.rows(value_states)
        self.cache.kv.append(self.index, step.append, k, v)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        return self.cache.seen + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_max_length(self) -> int:
        return self.cache.kv.config.capacity or -1

    def reset(self) -> None:
        if self.index == 0:
            self.cache.empty()

    def crop(self, tokens_to_remove: int) -> None:
        if self.index == 0:
            self.cache.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.cache.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0:
            self.cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.index == 0:
            self.cache.batch_select_indices(indices)

    def offload(self) -> None:
        _refuse("cache offloading")

    def prefetch(self) -> None:
        _refuse("cache offloading")


class _LayerWithState(_Layer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]  # as its own base
    """A layer that attends, and keeps a recurrent state as transformers' own layer `theirs` does (Falcon-H1)."""

    def __init__(self, theirs: LinearAttentionAndFullAttentionLayer, cache: LongreachCache, index: int):
        vars(self).update(vars(theirs))  # not yet used, so that only its settings are taken over
        self.cache, self.index = cache, index

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of the state: keys and values lie in the shared cache."""
        LinearAttentionAndFullAttentionLayer.lazy_initialization(self, *args, **kwargs)


def _layers(cache: LongreachCache, count: int, theirs: Sequence[Any] | None) -> list[Any]:
    """The layers for transformers: ours where keys and values are kept, transformers' own for the others."""
    if theirs is None:
        return [_Layer(cache, n) for n in range(count)]
    made: list[Any] = []
    number = 0
    for layer in theirs:
        if not isinstance(layer, CacheLayerMixin):
            made.append(layer)
            continue
        if isinstance(layer, LinearAttentionAndFullAttentionLayer):
            made.append(_LayerWithState(layer, cache, number))
        else:
            made.append(_Layer(cache, number))
        number += 1
    return made


class CacheOwner(Protocol):
    """The session that a cache belongs to. ledger: counts what evictions read."""

    ledger: Ledger

    def save_cache(
        self, cache: LongreachCache, path: str | os.PathLike[str], tokens: Any = None, overwrite: bool = False
    ) -> None:
        """Write one of its caches to a file, see `LongreachCache.save`."""


class LongreachCache(Cache):
    """The cache of one batch on an attached model. Pass it as `past_key_values` to continue it.

    layers: how many attend. theirs: for a hybrid model, the layers of transformers' own cache, of which those without
    attention are used; they become this cache's.
    """

    def __init__(
        self, layers: int, batch: int, config: CacheConfig, device: torch.device, owner: CacheOwner,
        eviction: Eviction | None = None, resident: Collection[int] = (), theirs: Sequence[Any] | None = None,
    ):  # fmt: skip
        super().__init__(layers=_layers(self, layers, theirs))
        self.states, self.attending = StateStore(batch), layers
        keeping = [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self.recurrent: RecurrentState | None = None  # of a hybrid model's layers
        if keeping:
            self.recurrent = state = RecurrentState(keeping, batch)
            self.states.of_model("recurrent layers", lambda: state)
        self.kv = KVCache(layers, batch, config, device, self.states, resident)
        self.resident = frozenset(resident)
        self.batch, self.owner = batch, owner
        self.real: list[Tensor | int] = []  # column by column: bool [B, T] on the host, or T if all are real
        self.columns = 0
        self.as_if: int | None = None
        self.device_columns: Tensor | None = None  # int64 [], the columns, for layers that ask within a static step
        self.layers_asked = False  # whether a layer has asked
        self.decoders: dict[Hashable, Any] = {}  # the decode loop's steps over this cache; they end with it
        self.attends: dict[Hashable, HostAttend] = {}  # who computes attention to host memory, where it was measured
        self.invalid: str | None = None  # why the cache can no longer be used, else None
        self._usual = self.eviction = eviction  # evicts keys after a prompt
        self.protected = 0  # first tokens of a prompt that are not evicted
        self.windows: Sequence[int] | None = (
            None  # rows at the end of each prompt that vote; None: the method's own number
        )
        self.saved_tokens: Tensor | None = None  # int64 [B, columns] of the file that it was loaded from
        self._prompt_read = False  # rows of a prompt came since keys were evicted last
        self.prompt_unplanned = False  # rows of a prompt came since plans were to be made of it last

    def reserve(self, new: Sequence[int], columns: int) -> None:
        """Make room at once for the new[b] tokens of a pass and `columns` more after it.

        A fixed-size cache is already allocated; it raises CapacityError when it is full.
        """
        if self.kv.config.capacity is None and self.kv.config.pages is None:
            self.kv.reserve(range(self.batch), [n + columns for n in new])

    def commit(self, step: Step) -> None:
        """The pass is done: its tokens count from now on."""
        before = list(self.kv.lengths)
        self.kv.commit(step.append)
        self.grow(step.width, step.column_mask())
        segment = step.layers.segments[0]
        self._prompt_read |= segment.phase == "prefill"
        self.prompt_unplanned |= segment.phase == "prefill"
        self.mark_observed((segment.method,) if segment.phase == "decode" else segment.observers, before)

    def mark_observed(self, methods: Sequence[PromptObserver], before: Sequence[int]) -> None:
        """The tokens past before[b] went through passes that these methods, and no others, observed."""
        self.states.mark_observed(methods, range(self.batch), before, self.kv.lengths)

    def evict_next(self, eviction: Eviction | None, protected: int, windows: Sequence[int] | None = None) -> None:
        """Set the eviction for the next prompts. protected: their first tokens, which stay. windows: rows at the end
        of each, at most the method's. `empty` undoes it."""
        if self.eviction is not None and self.eviction != eviction:
            self.states.drop(self.eviction)
        self.eviction, self.protected, self.windows = eviction, protected, windows

    @property
    def eviction_due(self) -> bool:
        """Whether a prompt was read from which keys are still to be evicted."""
        return self.eviction is not None and self._prompt_read

    def check_eviction(self) -> None:
        """Raise what `evict_prompt` raises for a state that cannot follow."""
        if self.eviction is None or not self._prompt_read:
            return
        for layer in range(self.attending):
            if self.states.states((self.eviction,), layer):
                self.states.check_keep(layer)

    def evict_prompt(self, room: int = 0) -> None:
        """Evict keys of the prompt that was read last, if that was not done yet. Waits for the device once, at first.

        room: tokens of the answer; their memory is not released.
        Raises what the eviction method and `KVCache.keep` raise; a state that cannot follow is refused before any layer
        is evicted from.
        """
        if self.eviction is None or not self._prompt_read:
            return
        self.check_eviction()
        slots, held = range(self.batch), dict[int, list[list[int]]]()
        for layer, state in self._last_rows():
            held[layer] = state.pos.cpu().tolist()
        for layer, pos in held.items():
            meter = Meter()
            ((_, state),) = self._last_rows(layer)
            view, lengths = self.kv.view_of_all(layer), self.kv.slots_in_use(layer)
            kept = self.eviction.kept(state, view, slots, lengths, self.protected, self.windows, meter, pos)
            if meter.noted:
                self.owner.ledger.add_eviction(replace(state.call, meter=meter), self._usual or self.eviction)
            del view, meter, state  # which refer to the layer's old memory
            self.states.drop(self.eviction, layer)  # so does it
            if kept:
                self.kv.keep(layer, list(kept), list(kept.values()), room, check=False)
        self.states.drop(self.eviction)  # a later prompt's rows make new ones
        self._prompt_read = False

    def _last_rows(self, layer: int | None = None) -> list[tuple[int, LastRows]]:
        """The eviction's state of each layer that has one, or of one layer."""
        layers = range(self.attending) if layer is None else (layer,)
        assert self.eviction is not None
        found = [(n, state) for n in layers for state in self.states.states((self.eviction,), n)]
        return [(n, state) for n, state in found if isinstance(state, LastRows)]

    def check_observed(self, method: AttentionMethod) -> None:
        """Raise InvalidInput where a method that observes prompts has missed tokens of this cache."""
        self.states.check_observed(method, range(self.batch), self.kv.lengths)

    def grow(self, columns: int, real: Tensor | None = None) -> None:
        """Add columns. real: bool [B, columns], None if all are real tokens."""
        if real is not None:
            self.real.append(real.cpu())
        elif self.real and isinstance(self.real[-1], int):
            self.real[-1] += columns
        else:
            self.real.append(columns)
        self.columns += columns

    @property
    def seen(self) -> int:
        """Columns reported to transformers: `as_if` for a step that must be valid for any number of them."""
        return self.columns if self.as_if is None else self.as_if

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:  # type: ignore[override]
        """Columns held, padding included; for transformers.

        layer_idx: a layer that asks while it runs (Llama-4 scales queries by it). In a static step the answer differs
        from replay to replay, so the layer gets a tensor on the device: int64 [].
        """
        if layer_idx is None or self.device_columns is None:
            return self.seen
        self.layers_asked = True
        return self.device_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns held, for transformers' masks: always a number, as masks are decided on the host."""
        return self.seen

    @property
    def padded(self) -> bool:
        """Whether some columns are padding."""
        return not all(isinstance(part, int) for part in self.real)

    def column_mask(self) -> Tensor:
        """bool [B, columns] on the host: which columns hold real tokens."""
        parts = [torch.ones(self.batch, p, dtype=torch.bool) if isinstance(p, int) else p for p in self.real]
        return torch.cat(parts, 1) if parts else torch.ones(self.batch, 0, dtype=torch.bool)

    # transformers' own methods would first go through the layers that keep a recurrent state

    def reset(self) -> None:
        self.empty()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last n columns, given as -n; as `drop_columns`."""
        if tokens_to_remove > 0:
            raise InvalidInput(f"crop: expected -n, to drop the last n columns, got {tokens_to_remove}")
        self.drop_columns(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        _refuse("beam search (it reorders the cache)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Hold each sequence `repeats` times, copies side by side; as `select`."""
        if not is_count(repeats, 1):
            raise InvalidInput(f"batch_repeat_interleave: expected a count >= 1, got {repeats!r}")
        self.select([row for row in range(self.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """As `select`. indices: int [n], or bool [B]."""
        self.select(rows_of(indices, self.batch))

    def activate_past_recording(self) -> None:
        if self.recurrent is not None:
            _refuse("recording the past of recurrent layers (assisted generation)")

    def can_drop(self, count: int) -> bool:
        """Whether states can follow if the last `count` columns are dropped. May wait for the device."""
        kept = self.column_mask()[:, : self.columns - count].sum(1).to(self.kv.device)
        try:
            self.states.check_truncate(torch.arange(self.batch, device=self.kv.device), kept)
        except Unsupported:
            return False
        return True

    def drop_columns(self, count: int) -> None:
        """Forget the last `count` columns (padding counts as columns).

        Raises Unsupported, with nothing changed, where a state cannot follow: the recurrent layers of a hybrid model
        can be cut to where the last pass began or a snapshot was taken, and to 0.
        """
        if not 0 <= count <= self.columns:
            raise InvalidInput(f"crop: the cache holds {self.columns} columns, cannot drop {count}")
        if count == 0:
            return
        kept = self.column_mask()[:, : self.columns - count]
        self.kv.truncate(range(self.batch), kept.sum(1).tolist())
        self.real, self.columns = [kept.shape[1] if bool(kept.all()) else kept], kept.shape[1]

    def save(self, path: str | os.PathLike[str], *, tokens: Any = None, overwrite: bool = False) -> None:
        """Write keys, values and state to a file, whole or not at all, from which `Session.load_cache` goes on.

        tokens: int64 [B, columns], to be saved too. overwrite: replace a file that is there.
        Hashes the model's weights, once a session. Raises InvalidInput for a file that exists or cannot be written, an
        empty cache and other tokens; Unsupported before the eviction of keys, under tensor parallelism, and for models
        and states that cannot be saved. After an error no file is left.
        """
        self.owner.save_cache(self, path, tokens, overwrite)

    def copy(self) -> LongreachCache:
        """A cache of the same tokens, with the state of methods: for branches, which go on independently.

        `copy.deepcopy` does the same. Its memory is its own. Not during a pass. Raises OutOfMemory, and Unsupported for
        a state that cannot be copied.
        """
        with memory_errors():
            kv = selected(self.kv, range(self.batch))
        config, device = self.kv.config, self.kv.device
        new = LongreachCache(len(self.layers), self.batch, config, device, self.owner, self._usual, self.resident)
        new._hold(kv)
        new.real, new.columns, new.invalid = list(self.real), self.columns, self.invalid
        new.eviction, new.protected, new.windows = self.eviction, self.protected, self.windows
        new._prompt_read, new.prompt_unplanned = self._prompt_read, self.prompt_unplanned
        new.saved_tokens = self.saved_tokens
        return new

    def __copy__(self) -> LongreachCache:
        return self.copy()  # a shallow copy would share its memory

    def __deepcopy__(self, memo: dict[int, Any]) -> LongreachCache:
        return self.copy()

    def select(self, rows: Sequence[int]) -> None:
        """Hold these sequences of the batch from now on, in this order; a row may come several times.

        transformers' `batch_select_indices` and `batch_repeat_interleave` do the same. New memory is allocated before
        the old one is released. Not during a pass. Raises InvalidInput, OutOfMemory, CapacityError, and Unsupported for
        a state that cannot be copied; then nothing has changed.
        """
        with memory_errors():
            kv = selected(self.kv, rows)
        self._hold(kv)
        self.batch = len(rows)
        self.real = [part if isinstance(part, int) else part[list(rows)] for part in self.real]
        if self.windows is not None:
            self.windows = [self.windows[row] for row in rows]
        if self.saved_tokens is not None:
            self.saved_tokens = self.saved_tokens[list(rows)]

    def _hold(self, kv: KVCache) -> None:
        """Use another memory; steps that were captured over the one before are no longer used."""
        assert isinstance(kv.state, StateStore)
        self.kv, self.states = kv, kv.state
        self.decoders.clear()
        self.attends.clear()

    @contextmanager
    def rollback(self, *methods: AttentionMethod) -> Iterator[None]:
        """Roll back all that is read or decoded within this block, with the state of methods.

        Holds a copy of state that truncation cannot restore (MAC's ring). methods: those whose state may change within
        the block, none for all.
        """
        columns, restore = self.columns, self._snapshot(methods)
        try:
            yield
        finally:
            self._roll_back(columns, restore)

    def empty(self) -> None:
        """Remove all tokens."""
        self.kv.reset(range(self.batch))
        self.real, self.columns, self.invalid = [], 0, None
        self._prompt_read = self.prompt_unplanned = False
        self.evict_next(self._usual, 0)

    def abandon(self, step: Step) -> None:
        """Undo a pass that failed half-way."""
        try:
            self.kv.abort(step.append)
        except LongreachError as refusal:
            self._invalidate(refusal)

    @contextmanager
    def restored_on_error(self, *, states: bool = False) -> Iterator[None]:
        """Within this block, an error (Ctrl-C too) leaves the cache with the columns it had, and no state of methods
        that was made within it.

        states: also restore the state of methods, which takes a copy as in `rollback`. Without it MAC afterwards has
        fewer rows to match, by the number that was read.
        """
        columns, made = self.columns, self.states.places
        restore = self._snapshot() if states else self._recurrent_snapshot()
        try:
            yield
        except ConcurrentUse:  # the columns of another caller, who goes on
            raise
        except BaseException:
            try:
                self._roll_back(columns, restore)
                self.states.drop_since(made)
            except LongreachError as refusal:
                self._invalidate(refusal)
            raise

    def _snapshot(self, methods: Sequence[AttentionMethod] = ()) -> Callable[[], None] | None:
        """Restores the state of methods (none named: all); None for an empty cache."""
        if not self.columns:
            return None
        with memory_errors():
            return self.states.snapshot(methods)

    def _recurrent_snapshot(self) -> Callable[[], None] | None:
        """Restores the state of recurrent layers, without a copy; None where there is none."""
        return self.recurrent.snapshot() if self.recurrent is not None and self.columns else None

    def _roll_back(self, columns: int, restore: Callable[[], None] | None) -> None:
        """Forget the columns after the first `columns`. Where fewer are left, states were cut with them and stay so."""
        if self.columns > columns:
            self.drop_columns(self.columns - columns)
        if self.columns == columns and restore is not None:
            restore()

    def _invalidate(self, refusal: LongreachError) -> None:
        why = f"a pass over this cache failed and could not be rolled back ({refusal})"
        self.invalid = f"{why}; use session.new_cache()"


def rows_of(indices: object, batch: int) -> list[int]:
    """Row numbers of a batch, from an int tensor [n], or a sequence of ints. Raises InvalidInput."""
    found = indices.tolist() if isinstance(indices, Tensor) and indices.dim() == 1 else indices
    if not isinstance(found, (list, tuple)) or not found or not all(is_count(row, 0) and row < batch for row in found):
        raise InvalidInput(f"batch_select_indices: expected row numbers [n] below {batch}, got {describe(indices)}")
    return list(found)
