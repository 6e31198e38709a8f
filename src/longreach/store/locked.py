"""Locks that die with their process (flock), however it dies and whatever namespace its number belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

from longreach.errors import Unsupported


def require_locks() -> None:
    """Raise Unsupported where the system has no flock."""
    if fcntl is None:
        raise Unsupported("a chunk store on a local disk needs flock (Linux, macOS); name other storage by its URL")


@contextmanager
def held(path: Path, create: bool = False) -> Iterator[None]:
    """Hold the lock of a file, waiting for it. Threads exclude each other too. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(fd), os.stat(path))
            except FileNotFoundError:
                if not create:
                    raise
                same = False
            if same:  # else someone removed the file while we waited, and others hold the new one
                yield
                return
        finally:
            os.close(fd)


def claim(fd: int) -> None:
    """Mark an open file as being written by us, for as long as it stays open."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def abandoned(path: Path) -> bool:
    """Whether nobody holds a file that was claimed once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
