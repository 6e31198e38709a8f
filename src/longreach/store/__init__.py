"""Precomputed chunks on disk: found by model, dtype, prefix and tokens; whole and right, or absent."""

from longreach.store.key import Chunk, ChunkKey, digest
from longreach.store.results import About, Collected, Entry, Got, LeftAlone, SetAside, Verified
from longreach.store.store import ChunkStore

__all__ = [
    "About",
    "Chunk",
    "ChunkKey",
    "ChunkStore",
    "Collected",
    "Entry",
    "Got",
    "LeftAlone",
    "SetAside",
    "Verified",
    "digest",
]
