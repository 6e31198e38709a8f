"""Results and reports of a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from longreach.store.key import Chunk, ChunkKey
from longreach.store.locked import unforked


class Entry(NamedTuple):
    """A chunk's file as the folder shows it, unread. bytes: of the file; last_used: seconds since 1970, None where the
    place keeps no such time."""

    name: str
    bytes: int
    last_used: float | None


class ChunkInfo(NamedTuple):
    """From a chunk's header: its key, how many tokens it and its prefix have, how many layers, and whether it
    holds the tokens' dependence."""

    key: ChunkKey
    tokens: int
    prefix: int
    layers: int
    dependence: bool


class SetAside(NamedTuple):
    """A file that is not a chunk, or not the one of its name: kind of fault, reason, and outcome.

    kind: "unreadable" where the disk or its rights refuse it. moved: whether it is in set-aside/ now. became: "set
    aside", "gone meanwhile" or "left in place (REASON)".
    """

    file: str
    kind: str
    why: str
    moved: bool
    became: str


class Lookup(NamedTuple):
    """Result of a look-up: the chunk, None if there is none; and the broken file in its place, if any."""

    chunk: Chunk | None
    broken: SetAside | None


class Ignored(NamedTuple):
    """An entry of a store's folder that is neither a chunk nor to be set aside or removed; and why."""

    file: str
    why: str


@dataclass(frozen=True)
class Verified:
    """Result of verify_all. bytes: of all files read."""

    whole: int
    bytes: int
    broken: tuple[SetAside, ...]
    left_alone: tuple[Ignored, ...]


@dataclass(frozen=True)
class Collected:
    """What gc removed: chunks with their bytes, unfinished ones of dead processes, broken ones that had been set aside
    with their bytes; and what it left alone."""

    chunks: int
    bytes: int
    leftovers: int
    broken: int
    broken_bytes: int
    left_alone: tuple[Ignored, ...]


class Counts:
    """Counters that several threads may raise."""

    def __init__(self) -> None:
        self._counts, self._broken, self._set_aside = Counter[str](), Counter[str](), Counter[str]()

    def add(self, name: str, count: int = 1) -> None:
        with unforked:
            self._counts[name] += count

    def gone(self, size: int) -> None:
        """A broken chunk that had been set aside was deleted."""
        self.add("broken_removed")
        self.add("bytes_broken_removed", size)

    def broken(self, kind: str, moved: bool) -> None:
        with unforked:
            self._broken[kind] += 1
            if moved:
                self._set_aside[kind] += 1

    def report(self) -> dict[str, Any]:
        names = ("hits", "misses", "verified", "bytes_read", "put", "already_there", "bytes_written", "evicted",
                 "bytes_evicted", "leftovers_removed", "broken_removed", "bytes_broken_removed",
                 "last_use_not_kept")  # fmt: skip
        with unforked:
            counts = {n: self._counts[n] for n in names}
            return {**counts, "broken": dict(self._broken), "set_aside": dict(self._set_aside)}
