"""A chunk from the store, else computed and stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.prompt_reader import Advance
from longreach.errors import StoreError
from longreach.store import Chunk, ChunkStore
from longreach.store.key import as_ids

State = Literal["stored", "computed", "recomputed"]


class ChunkResult(NamedTuple):
    """A chunk and where it came from.

    state: "stored" before; "computed"; or "recomputed", if the store's file was broken.
    error: why the store could not be read or written, else None; the chunk is correct in any case.
    """

    chunk: Chunk
    state: State
    error: StoreError | None


def get_or_compute(
    work: Precompute, store: ChunkStore | None, tokens: Sequence[int] | Tensor, progress: Advance = lambda done: None
) -> ChunkResult:
    """The chunk of these tokens; computed and stored if the store (None for none) does not have it whole.

    progress: called with the tokens done. Raises as Precompute.compute does, also where the store has the
    chunk (weights that changed have another key); what is wrong with the store is returned, so that the caller can go
    on without it.
    """
    tokens = as_ids(tokens).tolist()
    work.check(tokens)
    error: StoreError | None = None
    chunk = broken = None
    if store is not None:
        try:
            chunk, broken = store.get_or_told(work.key(tokens))
        except StoreError as refusal:
            error = refusal
    if chunk is not None:
        progress(len(tokens))
        return ChunkResult(chunk, "stored", None)
    chunk = work.compute(tokens, progress)
    if store is not None and error is None:
        try:
            store.put(chunk)
        except StoreError as refusal:
            error = refusal
    return ChunkResult(chunk, "recomputed" if broken else "computed", error)
