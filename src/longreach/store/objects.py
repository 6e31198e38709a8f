"""Chunks behind a URL, through fsspec: whole objects, each written with one put."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from longreach.errors import LongreachError, StoreError, Unsupported
from longreach.store import layout
from longreach.store.local import ENDING, SET_ASIDE_BYTES, StoredFile, is_broken, is_chunk, name_aside
from longreach.store.place import MARKER, absent_message, conflict_message, opened
from longreach.store.results import Counts, Entry, Ignored


class Objects:
    """Chunks as objects NAME.safetensors below a root; set-aside/ holds what was found broken or foreign.

    A marker object, put before the first chunk, makes the root a store: a root with other objects and no marker is
    refused. There are no locks, so nothing here counts, evicts or keeps the time of a use.
    """

    promises = ("atomic puts",)

    def __init__(self, location: str, storage_options: dict[str, Any] | None, create: bool, counts: Counts):
        self.location, self.counts = location, counts
        self._options, self._pid = storage_options, os.getpid()
        self._fs, root = opened(location, storage_options)
        self.root = root.rstrip("/")
        self.aside, self.marker = f"{self.root}/set-aside", f"{self.root}/{MARKER}"
        if not self._is_object(self.marker):
            if self.root and self._is_object(self.root):
                raise StoreError(f"{location} is an object, and no place for others; name one below which nothing is")
            if not create:
                raise absent_message(location)
            self._require_no_others()

    @property
    def fs(self) -> Any:
        """The filesystem; in a forked child one of its own, for fsspec's asynchronous ones work in no other process."""
        if self._pid != os.getpid():
            self._fs, _ = opened(self.location, self._options, skip_instance_cache=True)
            self._pid = os.getpid()
        return self._fs

    def has(self, name: str) -> bool:
        return self._is_object(self._path(name))

    def read(self, name: str) -> StoredFile | None:
        """The whole object, in memory; None if there is none."""
        with self._told():
            try:
                data = bytearray(self.fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None
        memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return StoredFile(memory, None)

    def load(self, name: str) -> StoredFile | None:
        """As read."""
        return self.read(name)

    def look(self, name: str, whole: bool) -> StoredFile | None:
        """Like read: nothing here keeps the time of a use."""
        return self.read(name)

    def write(
        self, name: str, header: bytes, buffers: Sequence[memoryview], replaced: StoredFile | None = None
    ) -> bool:
        """One put of all bytes; False where the object is there and is not to be replaced.

        Of two at once the later stays, both being whole.
        """
        if replaced is None and self.has(name):
            return False
        self._mark()
        with self._told():
            self.fs.pipe_file(self._path(name), b"".join([header, *buffers]))
        return True

    def _mark(self) -> None:
        """Make the root a store, if it is not one yet and may become one."""
        if self._is_object(self.marker):
            return
        self._require_no_others()
        with self._told():
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self.marker, b"a chunk store of longreach\n")

    def _require_no_others(self) -> None:
        """Raise StoreError if the root holds foreign objects."""
        names = [*self._files(self.root), *self._files(self.root, "directory")]
        if strange := [n for n in names if not is_chunk(n) and n not in (MARKER, "set-aside")]:
            raise conflict_message(self.location, strange[0])

    def sync(self) -> None:
        """No effect: the service keeps its objects."""

    def entries(self) -> list[Entry]:
        found = self._files(self.root)
        return sorted(Entry(n.removesuffix(ENDING), size, None) for n, size in found.items() if is_chunk(n))

    def strange(self) -> list[str]:
        return [name for name in self._files(self.root) if not is_chunk(name) and name != MARKER]

    def left_alone(self) -> list[Ignored]:
        """Foreign folders."""
        foreign = sorted(self._files(self.root, "directory").keys() - {"set-aside"})
        return [Ignored(name, "a folder that is not the store's; it is not looked into") for name in foreign]

    def remove(self, name: str) -> bool:
        with self._told():
            try:
                self.fs.rm_file(self._path(name))
            except FileNotFoundError:
                return False
        return True

    def set_aside(self, file: str, identity: tuple[int, ...] | None) -> bool:
        """Copy and delete. A good object put meanwhile may go the same way: then it is a miss once more.

        One object by its exact name: fsspec's mv, cp and rm take * ? [ ] in names for patterns.
        """
        path = f"{self.root}/{file}"
        if not self._fs._strip_protocol(path).endswith(f"/{file}"):
            raise StoreError("the service's library takes its name for another object's")
        self._mark()
        with self._told():
            self.fs.makedirs(self.aside, exist_ok=True)
            try:
                size = self.fs.info(path)["size"]
                first = self.fs.cat_file(path, start=0, end=min(size, layout.FIRST)) if size else b""
                copy = f"{self.aside}/{name_aside(file, layout.is_ours(first))}"
                self.fs.cp_file(path, copy)
                self.fs.invalidate_cache(self.aside)
                if self.fs.info(copy)["size"] != size:
                    raise StoreError(f"its copy {copy} is not whole")
            except FileNotFoundError as error:
                if self._is_object(path):
                    raise StoreError(f"it could not be copied: {error}") from error
                return False
            with suppress(FileNotFoundError):  # another process was first
                self.fs.rm_file(path)
        with suppress(OSError):  # the next one, or gc, does it
            self._cap_set_aside(SET_ASIDE_BYTES, [])
        return True

    def clear(self, max_bytes: int | None, broken: bool, left: list[Ignored]) -> Generator[Entry, None, None]:
        """Only objects set aside have a cap here. left: objects that may not be removed are added to it."""
        if max_bytes is not None:
            raise Unsupported(no_cap(self.location))
        self._cap_set_aside(-1 if broken else SET_ASIDE_BYTES, left)
        yield from ()

    def _cap_set_aside(self, most: int, left: list[Ignored]) -> None:
        """Broken chunks, the oldest first; the newest stays to be looked at unless none may (-1)."""
        total, broken = 0, sorted((f for f in self._files(self.aside).items() if is_broken(f[0])), reverse=True)
        for number, (name, size) in enumerate(broken):
            total += size
            if total > most and (number or most < 0):
                try:
                    with self._told(), suppress(FileNotFoundError):  # another process was first
                        self.fs.rm_file(f"{self.aside}/{name}")
                        self.counts.gone(size)
                except PermissionError as error:
                    left.append(Ignored(f"set-aside/{name}", f"may not be removed: {error.strerror or error}"))

    def _is_object(self, path: str) -> bool:
        with self._told():
            self.fs.invalidate_cache(self.root)  # another process may have put or removed it
            try:
                return bool(self.fs.info(path)["type"] == "file")
            except FileNotFoundError:
                return False

    def _files(self, folder: str, kind: str = "file") -> dict[str, int]:
        """Size by name."""
        with self._told():
            self.fs.invalidate_cache(folder)
            try:
                found = self.fs.ls(folder, detail=True)
            except FileNotFoundError:
                return {}
        paths = {f["name"].rstrip("/"): f["size"] or 0 for f in found if f["type"] == kind}
        return {path.rsplit("/", 1)[-1]: size for path, size in paths.items() if path.strip("/") != folder.strip("/")}

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}{ENDING}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Filesystems of fsspec raise their services' own errors; all of them become ours."""
        try:
            yield
        except (OSError, LongreachError):
            raise
        except Exception as error:
            raise StoreError(
                f"the chunk store {self.location} answered {type(error).__name__}: {error}; look at its "
                f"storage_options, or go on without a store"
            ) from error


def no_cap(location: str) -> str:
    """Why max_bytes is refused."""
    return (
        f"a size cap with LRU at {location}: only folders of local disks keep it; leave max_bytes out and let the "
        f"service's own rules remove what is old"
    )
