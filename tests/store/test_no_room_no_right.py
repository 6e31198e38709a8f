"""A full disk, a quota, a read-only folder, missing rights: clear errors, nothing half done, and reading goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longreach.errors import LongreachError, StoreError, StoreFull
from longreach.store import ChunkStore
from longreach.store.local import LocalFolder
from tests.store.factory import chunk, in_child, path, same, size

NOBODY = 65534
STRAY = f"{'0' * 64}.{'0' * 16}"  # as an unfinished chunk is called


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


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "rename"])
@pytest.mark.parametrize("cap", [None, 10**6])
def test_broken_chunks_give_way_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, cap: int | None
) -> None:
    """And foreign files do not."""
    aside, real = tmp_path / "set-aside", getattr(os, call)
    with ChunkStore(tmp_path, max_bytes=cap) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (0, 2):
            store.put(chunk(n))
        path(tmp_path, chunk(2)).write_bytes(path(tmp_path, chunk(2)).read_bytes()[:-8])
        (tmp_path / "stray.txt").write_text("x")
        store.verify_all()
        assert len(list(aside.iterdir())) == 2

        def full(*args: Any) -> Any:
            if len(list(aside.iterdir())) == 2 or stays_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        monkeypatch.setattr(os, call, full)
        stays_full = True
        with pytest.raises(StoreFull):
            store.put(chunk(1))
        going_on(store, tmp_path)
        assert [p.name[21:] for p in aside.iterdir()] == ["foreign-stray.txt"]
        stays_full = False
        (aside / f"{0:020d}-{chunk(5).key.name}.safetensors").write_bytes(b"as if set aside")
        assert store.put(chunk(1)) and same(store.get(chunk(1).key), chunk(1)) and store.report()["evicted"] == 0


def test_a_full_disk_is_told_of_also_where_broken_chunks_may_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setattr(LocalFolder, "_remove", refuse)
        with pytest.raises(StoreFull, match="No space left"):
            store.put(chunk(1))


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
            with pytest.warns(UserWarning, match=r"left in place \(Permission denied\)"):
                assert store.get(chunk(2).key) is None
            with pytest.raises(StoreError, match=r"broken file in the place of this chunk.*cannot be replaced.*denied"):
                store.put(chunk(2))
            with pytest.warns(UserWarning, match=r"left in place \(Permission denied\)"):
                (told,) = store.verify_all().broken
            assert not told.moved and told.became == "left in place (Permission denied)"
            assert store.report()["set_aside"] == {} != store.report()["broken"] and len(store.entries()) == 2
            for work in (lambda: store.remove(chunk(0).key), lambda: store.gc(0)):
                with pytest.raises(StoreError, match="Permission denied"):
                    work()
            if os.getuid() == NOBODY:  # not the files' owner
                assert store.report()["last_use_not_kept"] == 4  # two hits, and the broken one got and put

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


def test_a_put_that_the_cap_refuses_evicts_nothing(tmp_path: Path) -> None:
    one = size(chunk(0), tmp_path)
    with ChunkStore(tmp_path / "store", max_bytes=7 * one // 2) as store:
        for n in range(3):
            store.put(chunk(n))
        with (tmp_path / "store" / "writing" / ("0" * 64 + "." + "0" * 16)).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as its writer does
            file.truncate(3 * one)
            with pytest.raises(StoreFull, match=r"no room.*other processes are writing"):
                store.put(chunk(3))
            assert len(store.entries()) == 3 and store.report()["evicted"] == 0
        assert store.put(chunk(3)) and store.report()["evicted"] == 1


def test_a_full_disk_on_which_nothing_helps_evicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, real = size(chunk(0), tmp_path), os.statvfs
    with ChunkStore(tmp_path / "store", max_bytes=7 * one // 2) as store:
        for n in range(3):
            store.put(chunk(n))
        with monkeypatch.context() as patch:
            full = SimpleNamespace(
                f_blocks=9, f_bfree=10**9, f_bavail=0, f_frsize=real(tmp_path).f_frsize
            )  # but root's
            patch.setattr(os, "statvfs", lambda at: full)
            with pytest.raises(StoreFull, match="No space left"):
                store.put(chunk(3, tokens=6))  # more than the one that must go
            assert all(chunk(n).key in store for n in range(3))
            assert not list((tmp_path / "store" / "writing").iterdir())
            patch.setattr(os, "statvfs", lambda at: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=0))  # says nothing
            assert store.put(chunk(3)) and store.report()["evicted"] == 1


def test_a_folder_that_takes_no_files_evicts_nothing(open_folder: Path) -> None:
    with ChunkStore(open_folder) as store:
        store.put(chunk(0))
        room = store.entries()[0].bytes
    open_folder.chmod(0o777)
    (open_folder / "writing").chmod(0o555)
    (open_folder / "set-aside").chmod(0o555)

    def writer() -> None:
        with ChunkStore(open_folder, max_bytes=room) as store:
            with pytest.raises(StoreError, match="Permission denied"):
                store.put(chunk(1))
            assert chunk(0).key in store and store.report()["evicted"] == 0

    as_anyone(writer)


def unreadable(place: Path) -> None:
    place.write_bytes(b"half a chunk")
    place.chmod(0)


def a_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(place.parent):  # names of sockets must be short
        one.bind(place.name)


@pytest.mark.parametrize(
    "make",
    [unreadable, a_socket, lambda place: place.mkdir(), lambda place: place.symlink_to("/etc/passwd")],
    ids=["unreadable", "socket", "folder", "link"],
)
def test_what_cannot_be_judged_in_writing_stops_nothing(open_folder: Path, make: Callable[[Path], None]) -> None:
    with ChunkStore(open_folder) as store:
        store.put(chunk(0))
        room = 50 * store.entries()[0].bytes
    stray = open_folder / "writing" / STRAY
    make(stray)
    for place in (open_folder, open_folder / "writing", open_folder / "set-aside"):
        place.chmod(0o777)

    def writer() -> None:
        for cap in (None, room):
            with ChunkStore(open_folder, max_bytes=cap) as store:
                assert store.put(chunk(1)) and same(store.get(chunk(1).key), chunk(1))
                cleared, verified = store.gc(), store.verify_all()
                assert (cleared.chunks, cleared.leftovers) == (0, 0) and (verified.whole, verified.broken) == (2, ())
                assert [one.file for one in cleared.left_alone] == [f"writing/{STRAY}"]
                assert (
                    verified.left_alone == cleared.left_alone and "as far as can be told" in cleared.left_alone[0].why
                )
                assert store.remove(chunk(1).key)

    as_anyone(writer)
    assert os.path.lexists(stray)


def test_a_leftover_that_may_not_be_removed_is_told(open_folder: Path) -> None:
    ChunkStore(open_folder).close()
    (open_folder / "writing" / STRAY).write_bytes(b"half a chunk")
    open_folder.chmod(0o777)

    def cleaner() -> None:
        with ChunkStore(open_folder) as store:
            cleared = store.gc()
            assert cleared.leftovers == 0 and [one.file for one in cleared.left_alone] == [f"writing/{STRAY}"]

    (open_folder / "writing").chmod(0o555)
    as_anyone(cleaner)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that the system refuses to remove, as those of others in a folder with the sticky bit."""
    names, real = set[str](), Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name in names:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    return names


def test_a_chunk_that_may_not_be_removed_does_not_stop_the_cap(tmp_path: Path, kept: set[str]) -> None:
    one = size(chunk(0), tmp_path)
    with ChunkStore(tmp_path / "s", max_bytes=3 * one) as store:
        for n in range(3):
            store.put(chunk(n))
        kept.add(f"{chunk(0).key.name}.safetensors")
        assert store.put(chunk(3)) and chunk(0).key in store and chunk(1).key not in store
        found = store.gc(one)
        told = [(f"{chunk(0).key.name}.safetensors", "may not be removed: Operation not permitted")]
        assert found.chunks == 2 and [tuple(left) for left in found.left_alone] == told
        with pytest.raises(StoreError, match="Operation not permitted"):
            store.gc(0)  # nothing may go
        with pytest.raises(StoreError, match=r"may not be removed.*go on without"):
            store.put(chunk(4, tokens=30))
        assert not list((tmp_path / "s" / "writing").iterdir())
    with ChunkStore(tmp_path / "s", max_bytes=2 * one) as store:
        for n in (1, 2):
            store.put(chunk(n))
    with ChunkStore(tmp_path / "s") as store:
        store.put(chunk(3))
    with ChunkStore(tmp_path / "s", max_bytes=one) as store:
        assert store.gc().chunks == 2 and [e.name for e in store.entries()] == [chunk(0).key.name]


def test_a_broken_chunk_that_may_not_be_removed_does_not_stop_gc(tmp_path: Path, kept: set[str]) -> None:
    with ChunkStore(tmp_path) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(3):
            store.put(chunk(n))
            os.truncate(path(tmp_path, chunk(n)), 100)
            assert store.get(chunk(n).key) is None
        stuck = sorted(file.name for file in (tmp_path / "set-aside").iterdir())[1]
        kept.add(stuck)
        found = store.gc(set_aside=True)
        assert found.broken == 2 and [left.file for left in found.left_alone] == [f"set-aside/{stuck}"]
        assert [file.name for file in (tmp_path / "set-aside").iterdir()] == [stuck]
