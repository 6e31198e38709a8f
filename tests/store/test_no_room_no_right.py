"""A full disk, a quota, a read-only folder, missing rights: clear errors, nothing half done, and reading goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import LongreachError, StoreError, StoreFull
from longreach.store import ChunkStore
from tests.store.factory import chunk, in_child, path, same

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_anyone(work: Callable[[], None]) -> None:
    """Run in another process, whose rights are those of its files' modes even where ours are root's."""

    def child() -> None:
        if os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    assert in_child(child) == 0


def going_on(store: ChunkStore, folder: Path) -> None:
    """What was there is still got, and no part of what failed has stayed."""
    assert same(store.get(chunk(0).key), chunk(0))
    assert store.get(chunk(1).key) is None and chunk(1).key not in store
    assert not list((folder / "writing").iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "fsync", "rename"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StoreFull, match=r"(No space left|quota exceeded).*go on without a store"):
                store.put(chunk(1))
        going_on(store, tmp_path)
        assert store.put(chunk(1)) and same(store.get(chunk(1).key), chunk(1))


def test_a_disk_that_is_full_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, [0]

    def short(fd: int, buffers: list[memoryview], at: int) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [buffers[0][:5]], at)

    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", short)
            with pytest.raises(StoreFull):
                store.put(chunk(1))
        going_on(store, tmp_path)


def test_writes_that_come_in_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real(fd, [buffers[0][:13]], at))
    with ChunkStore(tmp_path) as store:
        assert store.put(chunk(3)) and same(store.get(chunk(3).key), chunk(3))


def test_a_filesystem_that_cannot_reserve_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with ChunkStore(tmp_path) as store:
        assert store.put(chunk(3)) and same(store.get(chunk(3).key), chunk(3))


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    def child() -> None:
        with ChunkStore(tmp_path) as store:
            store.put(chunk(0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            with pytest.raises(StoreFull, match="File too large"):
                store.put(chunk(1, tokens=400))
            going_on(store, tmp_path)

    assert in_child(child) == 0


def test_a_store_that_may_only_be_read(open_folder: Path) -> None:
    with ChunkStore(open_folder) as store:
        for n in (0, 2):
            store.put(chunk(n))
    os.truncate(path(open_folder, chunk(2)), 100)
    for folder in (open_folder, open_folder / "writing", open_folder / "set-aside"):
        folder.chmod(0o555)
    for file in open_folder.rglob("*"):
        file.chmod(0o444 if file.is_file() else 0o555)

    def reader() -> None:
        with ChunkStore(open_folder, max_bytes=10**6) as store:
            going_on(store, open_folder)
            with pytest.raises(StoreError, match=r"Permission denied.*go on without a store") as told:
                store.put(chunk(1))
            assert isinstance(told.value, LongreachError) and not isinstance(told.value, StoreFull)
            going_on(store, open_folder)
            with pytest.warns(UserWarning, match="left in place"):
                assert store.get(chunk(2).key) is None
            assert store.report()["set_aside"] and len(store.entries()) == 2
            for work in (lambda: store.remove(chunk(0).key), lambda: store.gc(0)):
                with pytest.raises(StoreError, match="Permission denied"):
                    work()
            if os.getuid() == NOBODY:  # not the files' owner
                assert store.report()["last_use_not_kept"] == 3  # two hits, and the broken one

    as_anyone(reader)


def test_a_folder_that_may_not_be_made(open_folder: Path) -> None:
    open_folder.chmod(0o555)

    def opener() -> None:
        with pytest.raises(StoreError, match="cannot open the chunk store"):
            ChunkStore(open_folder / "store")
        with pytest.raises(StoreError, match="cannot open the chunk store"):
            ChunkStore(open_folder)

    as_anyone(opener)


def test_a_chunk_that_may_not_be_read(open_folder: Path) -> None:
    with ChunkStore(open_folder) as store:
        for n in (0, 2):
            store.put(chunk(n))
    path(open_folder, chunk(2)).chmod(0)

    def reader() -> None:
        with ChunkStore(open_folder) as store, warnings.catch_warnings():
            warnings.simplefilter("error")  # no fault of the file's: it is not set aside
            with pytest.raises(StoreError, match="Permission denied"):
                store.get(chunk(2).key)
            assert same(store.get(chunk(0).key), chunk(0))

    if os.getuid() == 0:
        as_anyone(reader)
    else:
        reader()
