"""Memory: keys, values and state of sequences. It depends on shapes, not on models."""

from longreach.cache.append import Append, Placement
from longreach.cache.config import CacheConfig
from longreach.cache.decode_buffers import DecodeBuffers
from longreach.cache.kv import KVCache
from longreach.cache.restore import packed, restore
from longreach.cache.ring import RowRing
from longreach.cache.select import selected
from longreach.cache.state import SequenceState, StatelessOnTruncate
from longreach.cache.tiers import HostAttend, MemoryUse
from longreach.cache.token_state import PerTokenState

__all__ = [
    "Append",
    "CacheConfig",
    "DecodeBuffers",
    "HostAttend",
    "KVCache",
    "MemoryUse",
    "PerTokenState",
    "Placement",
    "RowRing",
    "SequenceState",
    "StatelessOnTruncate",
    "packed",
    "restore",
    "selected",
]
