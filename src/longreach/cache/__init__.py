"""Memory: keys, values and per-sequence state. Knows shapes, not models."""

from longreach.cache.kv import Append, CacheConfig, KVCache, NothingToForget, Remembering, SequenceState
from longreach.cache.per_slot import PerSlot
from longreach.cache.ring import RowRing
from longreach.cache.static import StaticSteps

__all__ = [
    "Append",
    "CacheConfig",
    "KVCache",
    "NothingToForget",
    "PerSlot",
    "Remembering",
    "RowRing",
    "SequenceState",
    "StaticSteps",
]
