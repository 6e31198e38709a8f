"""Bytes onto a disk: a temporary file that no other process takes for a dead one's, filled, ready for rename."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from longreach.store.locked import claim, let_go, opened

_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")
_AT_ONCE = 512  # buffers in a call; systems take 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(error: OSError) -> bool:
    """Whether the error means that a disk, a quota or a limit is full."""
    return error.errno in _NO_ROOM


def is_unfinished(file: str) -> bool:
    """Whether a file's name is one that `begin` makes."""
    return _UNFINISHED.fullmatch(file) is not None


def begin(folder: Path, name: str) -> tuple[int, Path]:
    """(descriptor, path) of a new temporary file, empty, which is ours until locked.let_go."""
    path = folder / f"{name}.{secrets.token_hex(8)}"
    fd = opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        claim(fd)
    except BaseException:
        abort(fd, path)
        raise
    return fd, path


def reserve(fd: int, size: int) -> None:
    """Room on the disk before the first byte is written, where the filesystem can."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # macOS
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)


def fill(fd: int, header: bytes, buffers: Sequence[memoryview]) -> None:
    """Write a chunk's file. The header comes last: until it is there the file is no chunk."""
    put(fd, buffers, len(header))
    put(fd, [memoryview(header)], 0)


def put(fd: int, buffers: Sequence[memoryview], at: int) -> None:
    """Write all buffers one after the other, from an offset on."""
    left = [b for b in buffers if b.nbytes]
    while left:
        done = os.pwritev(fd, left[:_AT_ONCE], at)
        at += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]


def abort(fd: int, path: Path) -> None:
    """Give a temporary file up."""
    try:
        path.unlink(missing_ok=True)
    finally:
        let_go(fd)


def sync_folder(path: Path) -> None:
    """Make renames into a folder durable (power loss)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
