"""A chunk from the store, else computed and stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from longreach.adapters.transformers.dependence import DependenceMeter
from longreach.adapters.transformers.precompute import NOTHING, Precompute
from longreach.adapters.transformers.prompt_reader import Advance
from longreach.adapters.transformers.ranks import Ranks, together
from longreach.errors import StoreError
from longreach.store import Chunk, ChunkPool, ChunkStore
from longreach.store.key import ChunkKey, as_ids

State = Literal["held", "stored", "computed", "recomputed"]


class ChunkResult(NamedTuple):
    """A chunk and where it came from.

    state: "held" in the pool; "stored" before; "computed"; or "recomputed", if the store's file was broken.
    error: why the store could not be read or written, else None; the chunk is correct in any case.
    dependence_computed: whether its dependence was computed now.
    """

    chunk: Chunk
    state: State
    error: StoreError | None
    dependence_computed: bool = False


def get_or_compute(
    work: Precompute,
    store: ChunkStore | None,
    tokens: Sequence[int] | Tensor,
    progress: Advance = lambda done: None,
    *,
    behind: Sequence[int] | Tensor = (),
    exact: bool = False,
    dependence: tuple[DependenceMeter, Sequence[int]] | None = None,
    mapped: bool = True,
    pool: ChunkPool | None = None,
) -> ChunkResult:
    """The chunk of these tokens; computed and stored if the store (None for none) does not have it whole.

    behind: tokens between the prefix and the chunk in a prompt. The store is searched for a chunk computed behind
    the prefix and them, which is exact there, then for one behind the prefix alone. A missing chunk is computed behind
    the prefix alone. A broken file is computed again for its own place, so an exact chunk stays exact.
    exact: search for the former alone, and compute that.
    dependence: a meter and the other chunk's tokens. A chunk behind the prefix alone that lacks its dependence gets it,
    and replaces the stored one.
    mapped: whether a stored chunk stays mapped to its file, else it is read into memory.
    pool: asked before the store, and given the chunk.

    Under tensor parallelism every rank must call it for the same chunks, with stores that are one folder. A chunk is
    taken if every rank has found it, with its dependence or without; otherwise all ranks compute it together, so that
    none waits for another. The first rank that lacks it puts it into its store, before any rank goes on. An error on
    one rank makes all raise (OtherRankFailed), but for one inside a pass; what was stored stays.
    progress: called with the tokens done; the chunk's, and with `dependence` as many again. Raises as
    Precompute.compute does, also where the store has the chunk (weights that changed have another key); what is wrong
    with the store is returned, so that the caller can go on without it.
    """
    tokens, behind = as_ids(tokens), as_ids(behind)
    with together(work.ranks):  # at its end the chunk is in the store, before another rank looks for it again
        target = behind if exact else NOTHING
        work.check(tokens, target)
        places = [behind] if exact or not len(behind) else [behind, NOTHING]
        keys = [] if store is None and pool is None and work.ranks is None else work.keys(tokens, places)
        found = _find(store, pool, keys, mapped and pool is None)
        lacking = found.chunk is None
        of_ranks = [found.number] if work.ranks is None else work.ranks.all_values(found.number)
        if len({*of_ranks}) > 1:  # ranks found different files, or none: all compute
            found = _Found(None, found.broken, found.error)
        if _FIRST_BROKEN in of_ranks:  # on this rank or another, which has set the file aside
            target = places[0]
        chunk, error = found.chunk, found.error
        state: State = "stored" if chunk is not None else "recomputed" if found.broken is not None else "computed"
        state = "held" if found.held else state
        if chunk is None:
            chunk = work.compute(tokens, progress, target)
        else:
            progress(len(tokens))
        dependence_computed = False
        if dependence is not None:
            meter, other = dependence
            # a chunk with a longer prefix is exact and is not recomputed
            shared = len(chunk.prefix) == len(work.prefix)
            dependence_computed = shared and chunk.dependence is None
            if dependence_computed:
                chunk = meter.measured(chunk, other, progress)
            else:
                progress(len(tokens))
        if pool is not None and (state != "held" or dependence_computed):
            chunk = pool.add(chunk)
        to_store = lacking or dependence_computed
        if found.held and not to_store and store is not None and error is None:  # it was not looked up in the store
            to_store, error = _lacks(store, chunk.key)
        if _is_writer(work.ranks, to_store and store is not None and error is None):
            assert store is not None
            try:
                store.put(chunk)
            except StoreError as refusal:
                error = refusal
        return ChunkResult(chunk, state, error, dependence_computed)


def _lacks(store: ChunkStore, key: ChunkKey) -> tuple[bool, StoreError | None]:
    """Whether a store has no chunk under this key; if the store cannot be read: False, and the error."""
    try:
        return key not in store, None
    except StoreError as refusal:
        return False, refusal


def _is_writer(ranks: Ranks | None, to_store: bool) -> bool:
    """Whether this process writes the chunk: the first rank whose `to_store` is true. A collective of all ranks."""
    if ranks is None:
        return to_store
    all_to_store = ranks.all_values(to_store)
    return to_store and not any(all_to_store[: ranks.rank])


_FIRST_BROKEN = -1


class _Found(NamedTuple):
    """The result of a search for a chunk.

    chunk: else None. broken: the index of the key for which the store had a broken file, else None. error: why the
    store could not be read, else None. held: whether the chunk comes from the pool.
    """

    chunk: Chunk | None = None
    broken: int | None = None
    error: StoreError | None = None
    held: bool = False

    @property
    def number(self) -> int:
        """Identifies the result among those that different ranks may find for one request: _FIRST_BROKEN for a broken
        file under the first key, 0 for no chunk otherwise."""
        if self.chunk is None:
            return _FIRST_BROKEN if self.broken == 0 else 0
        return 2 * len(self.chunk.prefix) + 2 + (self.chunk.dependence is not None)


def _find(store: ChunkStore | None, pool: ChunkPool | None, keys: Sequence[ChunkKey], mapped: bool) -> _Found:
    """The chunk under the first of these keys that the pool or the store has. The search ends at a broken file, which
    the store sets aside: the chunk in its place is computed again, not replaced by one of a later key."""
    error = None
    for number, key in enumerate(keys):
        if pool is not None and (held := pool.get(key)) is not None:
            return _Found(held, None, error, held=True)
        if store is None or error is not None:
            continue
        try:
            chunk, fault = store.lookup(key) if mapped else store.load(key)
        except StoreError as refusal:
            error = refusal
            continue
        if chunk is not None or fault is not None:
            return _Found(chunk, None if fault is None else number)
    return _Found(None, None, error)
