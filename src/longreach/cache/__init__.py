"""Memory: keys, values and per-sequence state. Knows shapes, not models."""

from longreach.cache.kv import Append, CacheConfig, KVCache, SequenceState

__all__ = ["Append", "CacheConfig", "KVCache", "SequenceState"]
