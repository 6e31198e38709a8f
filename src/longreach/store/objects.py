"""Chunks behind a URL, through fsspec: whole objects, each written with one put."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from longreach.errors import LongreachError, StoreError, Unsupported
from longreach.store.local import ENDING, SET_ASIDE_BYTES, Found, is_chunk
from longreach.store.results import Entry, LeftAlone


class Objects:
    """Chunks as objects NAME.safetensors below a root; set-aside/ holds what was found broken.

    A put shows an object whole or not at all where the service says so (S3, Google, Azure do); where one does not, the
    checks of every read stand alone. There are no locks, so nothing here counts, evicts or keeps the time of a use.
    """

    promises: tuple[str, ...] = ()

    def __init__(self, fs: Any, root: str, location: str):
        self.fs, self.root, self.location = fs, root.rstrip("/"), location
        self.aside = f"{self.root}/set-aside"

    def has(self, name: str) -> bool:
        with self._told():
            self.fs.invalidate_cache(self.root)  # another process may have removed it
            try:
                self.fs.info(self._path(name))
            except FileNotFoundError:
                return False
        return True

    def read(self, name: str) -> Found | None:
        """The whole object, in memory of its own; None where there is none."""
        with self._told():
            try:
                data = bytearray(self.fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None
        memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return Found(memory, None)

    def look(self, name: str, whole: bool) -> Found | None:
        """Like read: nothing here keeps the time of a use."""
        return self.read(name)

    def write(self, name: str, header: bytes, buffers: Sequence[memoryview]) -> bool:
        """One put of all bytes; False where the object is there. Of two at once the later stays, both being whole."""
        if self.has(name):
            return False
        with self._told():
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._path(name), b"".join([header, *buffers]))
        return True

    def entries(self) -> list[Entry]:
        found = [(f["name"].rsplit("/", 1)[-1], f["size"]) for f in self._files(self.root)]
        return sorted(Entry(n.removesuffix(ENDING), size, None) for n, size in found if is_chunk(n))

    def strange(self) -> list[str]:
        names = (f["name"].rsplit("/", 1)[-1] for f in self._files(self.root))
        return [name for name in names if name and not is_chunk(name)]

    def left_alone(self) -> list[LeftAlone]:
        """Foreign folders."""
        names = {f["name"].rstrip("/").rsplit("/", 1)[-1] for f in self._files(self.root, "directory")}
        foreign = sorted(names - {self.aside.rsplit("/", 1)[-1], self.root.rsplit("/", 1)[-1]})
        return [LeftAlone(name, "a folder that is not the store's; it is not looked into") for name in foreign]

    def remove(self, name: str) -> bool:
        with self._told():
            try:
                self.fs.rm_file(self._path(name))
            except FileNotFoundError:
                return False
        return True

    def set_aside(self, file: str, identity: tuple[int, ...] | None) -> bool:
        """Copy and delete. A good object put meanwhile may go the same way: then it is a miss once more."""
        with self._told():
            self.fs.makedirs(self.aside, exist_ok=True)
            try:
                self.fs.mv(f"{self.root}/{file}", f"{self.aside}/{time.time_ns():020d}-{file}")
            except FileNotFoundError:
                return False
        self._cap_set_aside()
        return True

    def clear(self, max_bytes: int | None) -> Generator[Entry, None, None]:
        """Only what was set aside has a cap here."""
        if max_bytes is not None:
            raise Unsupported(no_cap(self.location))
        self._cap_set_aside()
        yield from ()

    def _cap_set_aside(self) -> None:
        total = 0
        for number, file in enumerate(sorted(self._files(self.aside), key=lambda f: f["name"], reverse=True)):
            total += file["size"]
            if number and total > SET_ASIDE_BYTES:  # the newest stays, whatever its size, to be looked at
                with self._told():
                    self.fs.rm_file(file["name"])

    def _files(self, folder: str, kind: str = "file") -> list[dict[str, Any]]:
        with self._told():
            self.fs.invalidate_cache(folder)
            try:
                return [f for f in self.fs.ls(folder, detail=True) if f["type"] == kind]
            except FileNotFoundError:
                return []

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


def opened(location: str, storage_options: dict[str, Any] | None) -> tuple[Any, str]:
    """(fsspec filesystem, path in it) of a URL. Raises StoreError where fsspec cannot open it."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(location, **(storage_options or {}))
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise StoreError(
            f"fsspec cannot open the chunk store {location}: {error}; install what its protocol needs, or mend the URL "
            f"or storage_options"
        ) from error


def no_cap(location: str) -> str:
    """Why max_bytes is refused."""
    return (
        f"a size cap with LRU at {location}: only folders of local disks keep it; leave max_bytes out and let the "
        f"service's own rules remove what is old"
    )
