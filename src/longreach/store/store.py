"""The chunk store: precomputed keys and values that are right or absent."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from longreach.errors import InvalidInput, LongreachError, StoreError, StoreFull, UnknownName, Unsupported
from longreach.store import layout
from longreach.store.key import Chunk, ChunkKey
from longreach.store.layout import Broken, Head
from longreach.store.local import ENDING, LocalFolder, StoredFile, is_chunk
from longreach.store.locked import LockGone
from longreach.store.objects import Objects, no_cap
from longreach.store.place import folder_of, home, text_of
from longreach.store.results import ChunkInfo, Collected, Counts, Entry, Ignored, Lookup, SetAside, Verified
from longreach.store.writing import no_room

PROMISES = LocalFolder.promises
Verify = Literal["first", "always", "never"]
LEFT = "left in place"
TRIES = 3  # of a put that replaces, while others replace too


class _There(NamedTuple):
    """A stored chunk and its file."""

    chunk: Chunk
    file: StoredFile


class ChunkStore:
    """Chunks in a folder, or behind a URL of a service that puts objects whole or not at all; `with` closes it.

    location: a folder, or a URL such as "s3://bucket/chunks"; it must be empty or a store.
    max_bytes: of chunks, those being written and broken ones set aside included; the latter give way first, then the
      longest unused. None: no limit. It is this opener's: another who opens the store without it is not bound by it.
    verify: when checksums are compared: at a chunk's "first" read in this open store, "always", or "never". Structure,
      key and tokens are looked at in every read.
    storage_options: what fsspec's filesystem takes, of a URL.
    create: make a store if the folder holds none.

    On a local disk chunks are memory-mapped, appear whole or not at all, and processes may share the store. Other
    places read whole objects and write each with one put; what they cannot promise is refused by name.
    A file that is broken or foreign is warned of, counted in report(), moved to set-aside/ where it may be, and a miss.
    Broken chunks there have a cap of 256 MiB and give way where room is needed; foreign files are never deleted.
    An open store may be used in forked children (those of os.fork and what builds on it): they keep none of its locks,
    and open URLs again.
    Raises StoreError if the place cannot be used (StoreFull if it has no room); work can go on without a store.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        verify: Verify = "first",
        storage_options: dict[str, Any] | None = None,
        create: bool = True,
    ):
        if verify not in get_args(Verify):
            raise UnknownName("verify", verify, get_args(Verify))
        _require_bytes(max_bytes, 1)
        self.location, self.verify = text_of(location), verify
        self._counts, self._open = Counts(), True
        self._verified: dict[str, tuple[int, ...]] = {}  # name -> identity of the file that was whole
        with self._errors("open"):
            folder = folder_of(self.location, storage_options)
            self._files: LocalFolder | Objects
            if folder is not None:
                self._files = LocalFolder(home(folder), max_bytes, create, self._counts)
            elif max_bytes is not None:
                raise Unsupported(no_cap(self.location))
            else:
                self._files = Objects(self.location, storage_options, create, self._counts)

    @property
    def promises(self) -> tuple[str, ...]:
        """Those of PROMISES that hold for this store's place."""
        return self._files.promises

    def require(self, *promises: str) -> None:
        """Raise Unsupported, naming it, where one of PROMISES does not hold."""
        for promise in promises:
            if promise not in PROMISES:
                raise UnknownName("promise of a store", promise, PROMISES)
            if promise not in self.promises:
                raise Unsupported(f"{promise} at {self.location}: only folders of local disks promise it")

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is read or written; chunks that were got stay valid."""
        self._open = False

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a file of that name is there; only get finds out whether it is whole."""
        with self._errors("look into"):
            return self._files.has(key.name)

    def get(self, key: ChunkKey) -> Chunk | None:
        """The chunk, or None if there is no whole and correct one."""
        return self._get(key).chunk

    def lookup(self, key: ChunkKey) -> Lookup:
        """Like get, with the broken file in the chunk's place, if any."""
        return self._get(key)

    def load(self, key: ChunkKey) -> Lookup:
        """Like lookup, read into memory instead of mapped: what becomes of the file later does not matter, and a
        disk that fails is a miss."""
        return self._get(key, mapped=False)

    def _get(self, key: ChunkKey, *, mapped: bool = True) -> Lookup:
        chunk = set_aside = None
        with self._errors("read from"):
            found = None
            try:
                found = self._files.read(key.name) if mapped else self._readable(self._files.load, key.name)
                chunk = None if found is None else self._checked(key, found)
            except Broken as broken:
                set_aside = self._warn(self._set_aside(key.name + ENDING, found, broken), 4)
        if chunk is None:
            self._counts.add("misses")
        else:
            self._counts.add("hits")
            self._counts.add("bytes_read", chunk.bytes)
        return Lookup(chunk, set_aside)

    def put(self, chunk: Chunk) -> bool:
        """Store a chunk; it is on disk when this returns. False if it is there already, or came meanwhile.

        A chunk with dependence replaces one without, in one step: the one or the other is there, whole. One without
        replaces none. An existing file is checked as get checks it (checksums according to `verify`). If
        it is broken, it is set aside and replaced. Raises StoreError where it is broken and cannot be set aside.
        Nothing is evicted for a chunk that max_bytes or the folder's rights refuse.
        """
        new, replaces = False, chunk.dependence is not None
        with self._errors("write to"):
            for _ in range(TRIES if replaces else 1):  # a chunk put meanwhile may again lack dependence
                there = self._there(chunk.key)
                if there is not None and not (replaces and there.chunk.dependence is None):
                    self._files.sync()  # who put it may have died before that
                    break
                replaced = None if there is None else there.file
                if new := self._files.write(chunk.key.name, *layout.encode(chunk), replaced):
                    break
        if new:
            self._counts.add("bytes_written", chunk.bytes)
        self._counts.add("put" if new else "already_there")
        return new

    def entries(self) -> list[Entry]:
        """All chunks' files, the longest unused first; none is opened."""
        with self._errors("list"):
            return self._files.entries()

    def about(self, name: str) -> ChunkInfo | None:
        """From the header of an entry's file; None if it is gone or not a chunk (verify_all sets such aside).

        Raises StoreError where the file cannot be read.
        """
        with self._errors("read from"):
            try:
                found = self._files.look(name, whole=False)
                if found is None:
                    return None
                head = _head(found.memory)
            except Broken:
                return None
            return ChunkInfo(head.key, head.tokens, head.prefix, head.layers, head.dependence)

    def verify_all(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read every chunk and compare all checksums; set aside what is broken, misnamed or foreign. Counts as no use.

        A file that the disk or its permissions refuse to open is reported among the broken, kind "unreadable", and the
        rest is read. Foreign folders stay in place, unread, and are reported in left_alone, as are files in writing/
        without a living writer. progress: called with 1 after each file.
        """
        whole, total, broken = 0, 0, list[SetAside]()
        with self._errors("verify"):
            left = self._files.left_alone()
            for entry in self._files.entries():
                found = None
                try:
                    found = self._looked_at(entry.name)
                    if found is not None:
                        total += found.memory.numel()
                        _require_whole(found.memory, entry.name)
                        whole += 1
                except Broken as error:
                    broken.append(self._warn(self._set_aside(entry.name + ENDING, found, error)))
                except OSError as error:  # no fault of the file's that could be seen: it stays
                    self._counts.broken("unreadable", False)
                    set_aside = SetAside(entry.name + ENDING, "unreadable", error.strerror or str(error), False, LEFT)
                    broken.append(self._warn(set_aside))
                if progress:
                    progress(1)
            for file in self._files.strange():
                why = Broken("foreign", "it is a folder" if is_chunk(file) else "its name is not that of a chunk")
                broken.append(self._warn(self._set_aside(file, None, why)))
        return Verified(whole, total, tuple(broken), tuple(left))

    def gc(
        self,
        max_bytes: int | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        set_aside: bool = False,
    ) -> Collected:
        """Remove files of dead processes, and the longest unused chunks down to max_bytes (None: the store's own).

        set_aside: also all broken chunks in set-aside/, which are otherwise the first to go under max_bytes.
        left_alone names skipped chunks without permission to remove them, files in writing/ that are not the store's or
        may not be opened or removed, and foreign folders. Raises StoreError if max_bytes requires a removal and none is
        permitted.
        progress: called with 1 after each chunk removed.
        """
        _require_bytes(max_bytes, 0)
        before, chunks, size, kept = self.report(), 0, 0, list[Ignored]()
        with self._errors("clear"), closing(self._files.clear(max_bytes, set_aside, kept)) as removed:
            for entry in removed:
                chunks, size = chunks + 1, size + entry.bytes
                if progress:
                    progress(1)
        with self._errors("look into"):
            left = sorted({*kept, *self._files.left_alone()})
        after = self.report()
        leftovers, broken, broken_bytes = (
            after[name] - before[name] for name in ("leftovers_removed", "broken_removed", "bytes_broken_removed")
        )
        return Collected(chunks, size, leftovers, broken, broken_bytes, tuple(left))

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk. Returns False if the store does not hold it."""
        with self._errors("remove from"):
            return self._files.remove(key.name)

    def report(self) -> dict[str, Any]:
        """Counts since the store was opened: hits, misses, bytes, evictions; by kind of fault, how often a file was
        found broken and how many were set aside."""
        return self._counts.report()

    def _there(self, key: ChunkKey) -> _There | None:
        """The chunk, if it is there and whole; a use of it. What is broken is set aside. Raises StoreError."""
        found = None
        try:
            found = self._files.read(key.name)
            if found is not None:
                # a chunk's first get verifies it all the same
                return _There(self._checked(key, found, note=False), found)
        except Broken as broken:
            set_aside = self._set_aside(key.name + ENDING, found, broken)
            if set_aside.became.startswith(LEFT):
                raise StoreError(
                    f"the chunk store {self.location} has a broken file in the place of this chunk ({set_aside.why}), "
                    f"which cannot be replaced: {set_aside.file} is {set_aside.became}; mend the rights of the store, "
                    f"or go on without"
                ) from broken
            self._warn(set_aside, 4)
        return None

    def _checked(self, key: ChunkKey, found: StoredFile, note: bool = True) -> Chunk:
        head = _head(found.memory)
        layout.require(head, key)
        tensors = layout.tensors(head, found.memory)
        known = found.identity is not None and self._verified.get(key.name) == found.identity
        if self.verify == "always" or (self.verify == "first" and not known):
            layout.verify(head, tensors)
            self._counts.add("verified")
            if note and found.identity is not None:
                self._verified[key.name] = found.identity
        return layout.chunk_of(head, tensors, key)

    def _looked_at(self, name: str) -> StoredFile | None:
        return self._readable(lambda name: self._files.look(name, whole=True), name)

    def _readable(self, read: Callable[[str], StoredFile | None], name: str) -> StoredFile | None:
        """A file that is read whole. Raises Broken where the disk fails."""
        try:
            return read(name)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Broken("unreadable", "the disk fails to read it") from error

    def _set_aside(self, file: str, found: StoredFile | None, broken: Broken) -> SetAside:
        moved = False
        try:
            moved = self._files.set_aside(file, None if found is None else found.identity)
            became = "set aside" if moved else "gone meanwhile"
        except OSError as error:
            became = f"{LEFT} ({error.strerror or error})"
        self._counts.broken(broken.kind, moved)
        return SetAside(file, broken.kind, str(broken), moved, became)

    def _warn(self, set_aside: SetAside, stacklevel: int = 3) -> SetAside:
        text = f"chunk store {self.location}: {set_aside.file} is not used, {set_aside.became}: {set_aside.why}"
        warnings.warn(text, stacklevel=stacklevel)
        return set_aside

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        if not self._open:
            raise InvalidInput(f"the chunk store {self.location} is closed; open it again")
        try:
            yield
        except LongreachError:
            raise
        except OSError as error:
            kind, remedy = StoreError, "name another folder, or go on without a store"
            if isinstance(error, LockGone):
                remedy = "open it again, which makes the lock anew, or go on without a store"
            elif no_room(error):
                kind, remedy = StoreFull, "free some space, lower max_bytes, or go on without a store"
            why = error.strerror or str(error)
            raise kind(f"cannot {doing} the chunk store {self.location}: {why}; {remedy}") from error


def _require_bytes(given: Any, least: int) -> None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < least):
        raise InvalidInput(f"max_bytes: expected a number of bytes, at least {least}, or None, got {given!r}")


def _head(memory: Tensor) -> Head:
    raw = memory.numpy()
    length = layout.header_length(raw[:8].tobytes(), memory.numel())
    return layout.parse(raw[:length].tobytes(), memory.numel())


def _require_whole(memory: Tensor, name: str) -> None:
    """Raise Broken unless these are all bytes of the chunk of that name."""
    head = _head(memory)
    if head.key.name != name:
        raise Broken("another chunk", "it holds a chunk of another name")
    tensors = layout.tensors(head, memory)
    layout.verify(head, tensors)
    layout.chunk_of(head, tensors, head.key)
