"""What a store tells of itself."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from longreach.store.key import ChunkKey


class Entry(NamedTuple):
    """A chunk's file as the folder shows it, unread. bytes: of the file; last_used: seconds since 1970, None where the
    place keeps no such time."""

    name: str
    bytes: int
    last_used: float | None


class About(NamedTuple):
    """What a chunk's header says: its key, how many tokens it and its prefix have, how many layers."""

    key: ChunkKey
    tokens: int
    prefix: int
    layers: int


class SetAside(NamedTuple):
    """A file that was found to be no chunk, or not the one of its name: what kind of fault, and why."""

    file: str
    kind: str
    why: str


@dataclass(frozen=True)
class Verified:
    """What verify_all found. bytes: of all files read."""

    whole: int
    bytes: int
    broken: tuple[SetAside, ...]


@dataclass(frozen=True)
class Collected:
    """What gc removed: chunks with their bytes, and what dead processes had left of unfinished ones."""

    chunks: int
    bytes: int
    leftovers: int


class Counts:
    """Counters that several threads may raise."""

    def __init__(self) -> None:
        self._lock, self._counts, self._set_aside = threading.Lock(), Counter[str](), Counter[str]()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def set_aside(self, kind: str) -> None:
        with self._lock:
            self._set_aside[kind] += 1

    def report(self) -> dict[str, Any]:
        names = ("hits", "misses", "verified", "bytes_read", "put", "already_there", "bytes_written", "evicted",
                 "bytes_evicted", "leftovers_removed", "last_use_not_kept")  # fmt: skip
        with self._lock:
            return {**{n: self._counts[n] for n in names}, "set_aside": dict(self._set_aside)}
