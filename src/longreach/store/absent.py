"""Why a store has none of the chunks that were looked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from longreach.errors import StoreError
from longreach.store.key import ChunkKey
from longreach.store.store import ChunkStore

LOOKED_AT = 64  # chunks of the store


def absent_message(store: ChunkStore, keys: Sequence[ChunkKey]) -> str | None:
    """One line that says how the other chunks of a store differ from these, which were not in it; None if it has no
    other chunk, or cannot be read.

    Judged by the chunks that were used last, and by the first of `keys`, which share a model, a dtype and a prefix.
    """
    kinds, ours, mine = Counter[str](), keys[0], {key.name for key in keys}
    with suppress(StoreError):
        for entry in [entry for entry in store.entries() if entry.name not in mine][-LOOKED_AT:]:
            with suppress(StoreError):
                if (about := store.about(entry.name)) is None:
                    continue
                if about.key.dtype != ours.dtype:
                    kinds[f"of another dtype ({about.key.dtype})"] += 1
                elif about.key.model != ours.model:
                    kinds["of another model, or of other weights"] += 1
                elif about.key.prefix != ours.prefix:
                    kinds["behind another system prompt or other documents"] += 1
                else:
                    kinds["of other documents, or cut otherwise"] += 1
    if not kinds:
        return None
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"the store had none of these chunks. Of its {kinds.total()} most recently used chunks {shown}."
