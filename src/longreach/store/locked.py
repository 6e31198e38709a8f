"""Locks that end with their process (flock), however it ends and in any PID namespace.

A lock of flock belongs to what was opened, which a forked child shares: by itself the child would hold the lock for as
long as it lives, whatever becomes of its parent. So a lock is given back by name, not by closing alone, and a child
closes its copies as soon as it is forked (without unlocking, which would take the lock from its parent).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

from longreach.errors import Unsupported

unforked = threading.RLock()  # while a thread holds it no other forks: for what a child must not find half done
_lockable: set[int] = set()  # descriptors of this process on which a lock is or may be


class LockGone(OSError):
    """The file to lock no longer exists."""

    def __init__(self, path: Path):
        super().__init__(errno.ENOENT, f"its lock file {path} is gone (deleted, or moved with the folder)")


def require_locks() -> None:
    """Raise Unsupported where the system has no flock."""
    if fcntl is None:
        raise Unsupported("a chunk store on a local disk needs flock (Linux, macOS); name other storage by its URL")


def opened(path: Path, flags: int) -> int:
    """A descriptor to be locked, which children do not keep; for let_go. Raises OSError."""
    with unforked:
        fd = os.open(path, flags, 0o666)
        _lockable.add(fd)
    return fd


def let_go(fd: int) -> None:
    """Unlock and close the descriptor of `opened`. No effect in a child forked meanwhile, which has closed it."""
    with unforked:
        if fd in _lockable:
            _lockable.remove(fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)


def _in_child() -> None:
    while _lockable:
        os.close(_lockable.pop())
    unforked.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=unforked.acquire, after_in_parent=unforked.release, after_in_child=_in_child)


@contextmanager
def held(path: Path, create: bool = False) -> Iterator[None]:
    """Hold the lock of a file, waiting for it. Threads exclude each other too. Raises LockGone, other OSErrors."""
    while True:
        try:
            fd = opened(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        except FileNotFoundError as error:
            raise LockGone(path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(fd), os.stat(path))
            except FileNotFoundError as error:
                if not create:
                    raise LockGone(path) from error
                same = False
            if same:  # else someone removed the file while we waited, and others hold the new one
                yield
                return
        finally:
            let_go(fd)


def claim(fd: int) -> None:
    """Mark an open file as being written by us, for as long as it stays open."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def abandoned(path: Path) -> bool:
    """Whether no process holds a file that was claimed once. Raises OSError if that cannot be found out."""
    try:
        fd = opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        let_go(fd)
    return True
