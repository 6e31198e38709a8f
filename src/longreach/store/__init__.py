"""Precomputed chunks on disk: found by model, dtype, prefix and tokens; whole and right, or absent."""

from longreach.store.key import Chunk, ChunkKey, digest
from longreach.store.pool import ChunkPool
from longreach.store.results import ChunkInfo, Collected, Entry, Ignored, Lookup, SetAside, Verified
from longreach.store.store import ChunkStore

__all__ = [
    "Chunk",
    "ChunkInfo",
    "ChunkKey",
    "ChunkPool",
    "ChunkStore",
    "Collected",
    "Entry",
    "Ignored",
    "Lookup",
    "SetAside",
    "Verified",
    "digest",
]
