"""Chunks in a folder of a local disk. The folder is the only truth: no index can disagree with it.

    FOLDER/NAME.safetensors    a chunk, whole; its access time is its last use
    FOLDER/writing/            NAME.RANDOM, chunks being written, each claimed by its writer's lock; unclaimed ones are
                               leftovers. All else in it is left alone
    FOLDER/set-aside/          TIME-NAME.safetensors, chunks that were found broken: they have a cap, and go first where
                               room is needed; TIME-foreign-FILE, what is not of our making: never deleted, not counted
    FOLDER/.longreach-chunk-store    the lock under which files appear, disappear and are counted; it makes this a store

Access times are set by us, explicitly, so they work where the system keeps none; where it does, reads by other programs
count as uses as well. Modification times stay those of the writing and tell a file from the one in its place before.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.errors import StoreError, StoreFull
from longreach.store import layout, writing
from longreach.store.locked import abandoned, held, let_go, require_locks
from longreach.store.place import MARKER, absent_message, conflict_message
from longreach.store.results import Counts, Entry, Ignored

ENDING = ".safetensors"
LOCK = MARKER
SET_ASIDE_BYTES = 1 << 28
_CHUNK = re.compile(r"[0-9a-f]{64}\.safetensors")
_BROKEN = re.compile(r"[0-9]{20}-[0-9a-f]{64}\.safetensors")


@dataclass(frozen=True)
class StoredFile:
    """A file's bytes, uint8 [size]; identity: distinct from that of other files of its name, or None."""

    memory: Tensor
    identity: tuple[int, ...] | None


class LocalFolder:
    """Reading, writing, counting and clearing of a folder. Raises the system's OSErrors."""

    promises = ("memory mapping", "fsync and rename", "a size cap with LRU", "several processes", "atomic puts")

    def __init__(self, path: Path, max_bytes: int | None, create: bool, counts: Counts):
        require_locks()
        self.path, self.max_bytes, self.counts = path, max_bytes, counts
        self.writing, self.aside, self.lock = path / "writing", path / "set-aside", path / LOCK
        if not self.lock.is_file():
            if not create:
                raise absent_message(path)
            self._make()

    def _make(self) -> None:
        """Make a folder ours. Other people's files are not to be set aside, so it must be empty, or hold chunks."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        if strange := self._others():
            raise conflict_message(self.path, strange[0])
        self.writing.mkdir(exist_ok=True)
        self.aside.mkdir(exist_ok=True)
        with held(self.lock, create=True):
            writing.sync_folder(self.path)
        for folder in missing:
            writing.sync_folder(folder.parent)

    def _others(self) -> list[str]:
        """Foreign entries of the folder, in writing/ too."""
        folders, found = (self.writing.name, self.aside.name), list[str]()
        for entry in os.scandir(self.path):
            if entry.name in folders and entry.is_dir(follow_symlinks=False):
                continue
            if entry.name != LOCK and not is_chunk(entry.name):
                found.append(entry.name)
        return found + [f"{self.writing.name}/{e.name}" for e in self._begun() if not writing.is_unfinished(e.name)]

    def _begun(self) -> list[os.DirEntry[str]]:
        """The entries of writing/; none if that is a link, as its target is not the store's."""
        return list(os.scandir(self.writing)) if self.writing.is_dir() and not self.writing.is_symlink() else []

    def file(self, name: str) -> Path:
        return self.path / (name + ENDING)

    def has(self, name: str) -> bool:
        return os.path.lexists(self.file(name))

    def read(self, name: str) -> StoredFile | None:
        """Map a file, which is a use of it; None if there is none. Writes to the pages stay private."""
        with self._opened(name) as fd:
            if fd is None:
                return None
            found = _found(fd, _map)
            self._use(fd)
            return found

    def load(self, name: str) -> StoredFile | None:
        """Like read, but into memory: later changes to the file do not affect it.

        Raises OSError where the disk fails.
        """
        with self._opened(name) as fd:
            if fd is None:
                return None
            found = _found(fd, _load)
            self._use(fd)
            return found

    def look(self, name: str, whole: bool) -> StoredFile | None:
        """Like read, but no use; where the file is another user's and the system keeps access times, it does count.

        whole: read all of it, so that a failing disk is an OSError. Else it is mapped, to be let go soon.
        """
        with self._opened(name, getattr(os, "O_NOATIME", 0)) as fd:
            return None if fd is None else _found(fd, _load if whole else _peek)

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int = 0) -> Iterator[int | None]:
        """A descriptor, so that all operations are on the same file, even if its name changes meanwhile.

        Raises Broken where nothing can be opened there.
        """
        flags |= os.O_RDONLY | os.O_NONBLOCK  # a pipe of that name is not waited for
        try:
            fd = os.open(self.file(name), flags)
        except FileNotFoundError as error:
            if self.file(name).is_symlink():
                raise layout.Broken("foreign", "it is a link that leads nowhere") from error
            yield None
            return
        except PermissionError:
            fd = os.open(self.file(name), os.O_RDONLY | os.O_NONBLOCK)  # only owners may read without a trace
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise layout.Broken("foreign", "it is no file that can be read") from error  # a socket, a circle of links
        try:
            yield fd
        finally:
            os.close(fd)

    def _use(self, fd: int) -> None:
        """If the time cannot be set, the report counts it."""
        try:
            os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
        except OSError:
            self.counts.add("last_use_not_kept")

    def write(
        self, name: str, header: bytes, buffers: Sequence[memoryview], replaced: StoredFile | None = None
    ) -> bool:
        """Put a file in its place, whole; False where one is there, other than `replaced`. Raises StoreFull.

        No chunk gives way to one that is refused, unless the disk refuses room that it reported as free. All
        broken ones that were set aside go before a full disk is reported. Under max_bytes the file that is replaced
        gives way before other chunks.
        """
        try:
            return self._write(name, header, buffers, replaced)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._drop_broken():
                raise
        return self._write(name, header, buffers, replaced)

    def _write(self, name: str, header: bytes, buffers: Sequence[memoryview], replaced: StoredFile | None) -> bool:
        size = len(header) + sum(b.nbytes for b in buffers)
        with held(self.lock):
            self._collect()
            fd, temporary = writing.begin(self.writing, name)
            try:
                self._make_room(size, None if replaced is None else name)
                writing.reserve(fd, size)
            except BaseException:
                writing.abort(fd, temporary)
                raise
        try:
            writing.fill(fd, header, buffers)
            now = time.time_ns()
            os.utime(temporary, ns=(now, now))
            os.fsync(fd)
            with held(self.lock):
                if new := not self.has(name) or (replaced is not None and self._is(name, replaced)):
                    os.rename(temporary, self.file(name))
                else:
                    temporary.unlink()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            let_go(fd)
        self.sync()
        return new

    def _is(self, name: str, file: StoredFile) -> bool:
        """Whether this very file is in its place; for a link, its target."""
        try:
            return _identity(self.file(name).stat()) == file.identity
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        """Make the folder's entries durable (power loss), whichever process put them."""
        writing.sync_folder(self.path)

    def entries(self) -> list[Entry]:
        """All chunks' files, the longest unused first."""
        found = []
        for entry in os.scandir(self.path):
            if is_chunk(entry.name) and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(Entry(entry.name.removesuffix(ENDING), status.st_size, status.st_atime))
        return sorted(found, key=lambda e: (e.last_used or 0, e.name))

    def strange(self) -> list[str]:
        """Names of files in the folder that are no chunk's, and of folders that have a chunk's name."""
        found = [(e.name, e.is_dir(follow_symlinks=False)) for e in os.scandir(self.path) if e.name != LOCK]
        return [name for name, folder in found if folder == is_chunk(name)]

    def left_alone(self) -> list[Ignored]:
        """Foreign folders, and files in writing/ without a known living writer."""
        ours, found = (self.writing.name, self.aside.name), list[Ignored]()
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False) and not is_chunk(entry.name) and entry.name not in ours:
                found.append(Ignored(entry.name, "a folder that is not the store's; it is not looked into"))
        if self.writing.is_symlink():
            found.append(Ignored(self.writing.name, "a link; what it leads to is not the store's to remove"))
        with held(self.lock):
            for entry in self._begun():
                if not writing.is_unfinished(entry.name):
                    why = "its name is not that of an unfinished chunk"
                    found.append(Ignored(f"{self.writing.name}/{entry.name}", why))
                    continue
                try:
                    why = "unfinished, of a dead process; gc or the next put removes it where it may"
                    dead = abandoned(Path(entry.path))
                except OSError as error:
                    why, dead = f"no unfinished chunk, as far as can be told: {error.strerror}", True
                if dead:
                    found.append(Ignored(f"{self.writing.name}/{entry.name}", why))
        return sorted(found)

    def remove(self, name: str) -> bool:
        with held(self.lock):
            return _unlink(self.file(name))

    def set_aside(self, file: str, identity: tuple[int, ...] | None) -> bool:
        """Move a file away unless another has taken its place; the oldest broken chunks go when they are many."""
        path = self.path / file
        with held(self.lock):
            try:
                if identity is not None and _identity(path.stat()) != identity:  # of a link: its target's
                    return False
                self.aside.mkdir(exist_ok=True)
                os.rename(path, self.aside / name_aside(file, _is_ours(path)))
            except FileNotFoundError:
                return False
            with contextlib.suppress(OSError):  # the next one, or gc, does it
                self._cap_set_aside([])
        return True

    def clear(self, max_bytes: int | None, broken: bool, left: list[Ignored]) -> Generator[Entry, None, None]:
        """Remove leftovers, and the longest unused chunks down to a size; yields those chunks.

        broken: also all broken ones that were set aside. left: what may not be removed is added to it. Raises
        PermissionError if max_bytes requires a removal and none is permitted.
        """
        with held(self.lock):
            self._collect()
            self._cap_set_aside(left)
            if broken:
                self._remove(self._broken(), left)
            limit = self.max_bytes if max_bytes is None else max_bytes
            if limit is not None:
                removed, refused = 0, len(left)
                for removed, entry in enumerate(self._evict(limit, left), 1):  # noqa: B007
                    yield entry
                if not removed and len(left) > refused:
                    raise PermissionError(errno.EACCES, left[-1].why)

    def _make_room(self, size: int, replaced: str | None) -> None:
        if self.max_bytes is None:
            return
        if size > self.max_bytes:
            raise StoreFull(f"a chunk of {size} bytes is larger than the store's max_bytes={self.max_bytes}; raise it")
        begun = 0
        for entry in filter(lambda e: writing.is_unfinished(e.name), os.scandir(self.writing)):
            with contextlib.suppress(FileNotFoundError):  # a writer that failed takes its file away without the lock
                begun += entry.stat(follow_symlinks=False).st_size
        if begun + size > self.max_bytes:
            raise StoreFull(
                f"max_bytes={self.max_bytes} has no room for {size} bytes beside {begun} that other processes are "
                f"writing; raise it"
            )
        going = self._giving_way(self.max_bytes - begun - size, replaced)
        disk = os.statvfs(self.writing)  # no room even after them? of no blocks: a filesystem that does not report it
        if going and disk.f_blocks and size > disk.f_bavail * disk.f_frsize + sum(e.bytes for _, e in going):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = list[Ignored]()
        for _ in self._evict(self.max_bytes - begun - size, left, replaced):
            pass
        if left and sum(e.bytes for _, e in self._all()) > self.max_bytes - begun - size:
            raise PermissionError(errno.EACCES, f"{left[0].file} {left[0].why}")

    def _all(self, first: str | None = None) -> list[tuple[Path, Entry]]:
        """Files in the order of removal: broken chunks, then `first`, then the longest unused."""
        entries = sorted(self.entries(), key=lambda e: e.name != first)
        return [*self._broken(), *((self.file(e.name), e) for e in entries)]

    def _giving_way(self, limit: int, first: str | None) -> list[tuple[Path, Entry]]:
        """The files to remove so that the rest is at most `limit` bytes."""
        files = self._all(first)
        total, count = sum(e.bytes for _, e in files), 0
        while total > limit and count < len(files):
            total -= files[count][1].bytes
            count += 1
        return files[:count]

    def _evict(self, limit: int, left: list[Ignored], first: str | None = None) -> Iterator[Entry]:
        """Remove what must give way to `limit`; yields chunks that were not known to be broken.

        What may not be removed is passed over and added to `left`, and the next ones go in its stead.
        """
        files = self._all(first)
        total = sum(e.bytes for _, e in files)
        for path, entry in files:
            if total <= limit:
                return
            refused = len(left)
            removed = self._unlinked(path, left)
            if len(left) > refused:
                continue
            total -= entry.bytes
            if removed and path.parent == self.aside:
                self.counts.gone(entry.bytes)
            elif removed:
                self.counts.add("evicted")
                self.counts.add("bytes_evicted", entry.bytes)
                yield entry

    def _unlinked(self, path: Path, left: list[Ignored]) -> bool:
        """Whether a file was removed; added to `left` where it may not be."""
        try:
            return _unlink(path)
        except PermissionError as error:
            why = f"may not be removed: {error.strerror}"
            left.append(Ignored(path.relative_to(self.path).as_posix(), why))
            return False

    def _broken(self) -> list[tuple[Path, Entry]]:
        """Chunks that were set aside, the oldest first."""
        found = []
        for entry in os.scandir(self.aside) if self.aside.is_dir() else ():
            if is_broken(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((Path(entry.path), Entry(entry.name, entry.stat().st_size, None)))
        return sorted(found)

    def _remove(self, broken: Sequence[tuple[Path, Entry]], left: list[Ignored]) -> int:
        """Number of files removed."""
        removed = [entry for path, entry in broken if self._unlinked(path, left)]
        for entry in removed:
            self.counts.gone(entry.bytes)
        return len(removed)

    def _drop_broken(self) -> bool:
        """Whether there was any to drop, and it went."""
        try:
            with held(self.lock):
                return self._remove(self._broken(), []) > 0
        except OSError:  # the full disk is the error to report
            return False

    def _collect(self) -> None:
        """Remove files of dead processes. Files without permission stay: they must not stop all writing."""
        self.writing.mkdir(exist_ok=True)
        for entry in filter(lambda e: writing.is_unfinished(e.name), self._begun()):
            with contextlib.suppress(OSError):  # left_alone reports it
                if abandoned(Path(entry.path)) and _unlink(Path(entry.path)):
                    self.counts.add("leftovers_removed")

    def _cap_set_aside(self, left: list[Ignored]) -> None:
        self.aside.mkdir(exist_ok=True)
        total, broken = 0, self._broken()
        for number, one in enumerate(reversed(broken)):
            total += one[1].bytes
            if number and total > SET_ASIDE_BYTES:  # the newest stays for inspection, at any size
                self._remove([one], left)


def _found(fd: int, memory_of: Callable[[int, int], Tensor]) -> StoredFile:
    status = os.fstat(fd)
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    try:
        return StoredFile(memory_of(fd, size) if size else torch.empty(0, dtype=torch.uint8), _identity(status))
    except (StoreError, OSError):  # no memory for it: for a file of any length that is no chunk's
        first = os.pread(fd, layout.header_length(os.pread(fd, 8, 0), size), 0)
        layout.parse(first, size)
        raise


def _map(fd: int, size: int) -> Tensor:
    """Private pages of the file; torch opens it again, by descriptor, and keeps nothing open."""
    try:
        storage: Any = torch.UntypedStorage.from_file(f"/dev/fd/{fd}", False, size)
    except RuntimeError as error:
        raise StoreError(f"cannot map a chunk of {size} bytes into memory: {error}; go on without a store") from error
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))


def _peek(fd: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _load(fd: int, size: int) -> Tensor:
    """All bytes; fewer where the file ends early."""
    try:
        memory = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise StoreError(f"no memory to read a chunk of {size} bytes into: {error}; go on without a store") from error
    left = memoryview(memory.numpy())  # type: ignore[arg-type]
    while left.nbytes and (got := os.preadv(fd, [left], size - left.nbytes)):
        left = left[got:]
    return memory[: size - left.nbytes]


def is_chunk(file: str) -> bool:
    """Whether a file's name is that of a chunk."""
    return _CHUNK.fullmatch(file) is not None


def is_broken(file: str) -> bool:
    """Whether a file in set-aside/ was a chunk of ours, by the name that name_aside gave it."""
    return _BROKEN.fullmatch(file) is not None


def name_aside(file: str, ours: bool) -> str:
    """A file's name in set-aside/. ours: whether its first bytes look like a chunk's."""
    return f"{time.time_ns():020d}-{'' if ours and is_chunk(file) else 'foreign-'}{file}"


def _is_ours(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and layout.is_ours(os.pread(fd, layout.FIRST, 0))
    except OSError:
        return False
    finally:
        os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, IsADirectoryError):
        return False
    return True
