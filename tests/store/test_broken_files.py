"""Files that are torn, changed, misplaced or foreign: a miss, set aside, counted, warned of, and never used."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach.errors import StoreError
from longreach.store import ChunkStore, writing
from longreach.store import local as local_module
from longreach.store.local import LOCK
from tests.store.factory import chunk, path, same
from tests.tiers import swept


def flipped(file: Path, at: int, bits: int = 0x10) -> None:
    """Change a byte, leaving the time of the file's writing as it was."""
    times = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= bits
    with file.open("r+b") as stream:
        stream.write(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def header_length(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def stored(folder: Path) -> Path:
    with ChunkStore(folder) as store:
        store.put(chunk(1, prefix=(1, 2)))
    return path(folder, chunk(1, prefix=(1, 2)))


def is_a_miss(folder: Path, verify: str = "first", kind: str | None = None) -> None:
    """A broken file under chunk 1's name is not used, once; the chunk can then be put and got again."""
    one = chunk(1, prefix=(1, 2))
    broken = path(folder, one).read_bytes() if path(folder, one).is_file() else None
    with ChunkStore(folder, verify=verify) as store:  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="is not used, set aside"):
            assert store.get(one.key) is None
        aside = list((folder / "set-aside").iterdir())
        assert len(aside) == 1 and one.key.name in aside[0].name
        assert broken is None or aside[0].read_bytes() == broken
        found = store.report()["set_aside"]
        assert sum(found.values()) == 1 and (kind is None or kind in found), found
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.get(one.key) is None  # merely absent now
            assert store.put(one) and same(store.get(one.key), one)


@pytest.mark.parametrize("first", swept(range(3), 1))
def test_every_flipped_byte_of_a_file_is_found(tmp_path: Path, first: int) -> None:
    file = stored(tmp_path)
    whole, one = file.read_bytes(), chunk(1, prefix=(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at in range(first, len(whole), 3):
            with ChunkStore(tmp_path) as store:
                flipped(file, at, 1 << at % 8)
                assert store.get(one.key) is None, at
                assert not file.exists()
                file.write_bytes(whole)
    with ChunkStore(tmp_path) as store:
        assert same(store.get(one.key), one)


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("where", ["length", "header", "prefix", "tokens", "first tensor", "last byte"])
def test_a_flipped_byte_is_set_aside(tmp_path: Path, where: str, verify: str) -> None:
    file = stored(tmp_path)
    head = header_length(file)
    at = {"length": 1, "header": head // 2, "prefix": head, "tokens": head + 16, "first tensor": head + 50}
    flipped(file, at.get(where, -1))
    is_a_miss(tmp_path, verify)


def test_without_verification_structure_and_key_still_count(tmp_path: Path) -> None:
    file = stored(tmp_path)
    head = header_length(file)
    for at in (1, head // 2, head, head + 16):
        flipped(file, at)
        is_a_miss(tmp_path, "never")
        shutil.rmtree(tmp_path / "set-aside")
    flipped(file, -1)
    with ChunkStore(tmp_path, verify="never") as store:
        assert store.get(chunk(1, prefix=(1, 2)).key) is not None  # as documented: data is not looked at


def test_a_change_after_the_first_read_is_found_at_the_next_verification(tmp_path: Path) -> None:
    file, one = stored(tmp_path), chunk(1, prefix=(1, 2))
    with ChunkStore(tmp_path, verify="always") as always, ChunkStore(tmp_path) as first:
        assert first.get(one.key) and always.get(one.key)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)  # changes the file's time, as any honest writing does
        with pytest.warns(UserWarning, match="checksum"):
            assert first.get(one.key) is None
        assert always.get(one.key) is None and always.report()["misses"] == 1


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1, -8, "header", "half", "longer"])
def test_a_truncated_or_grown_file_is_set_aside(tmp_path: Path, size: int | str) -> None:
    file = stored(tmp_path)
    whole, head = file.stat().st_size, header_length(file)
    named = {"header": head, "half": (head + whole) // 2, "longer": whole + 8}
    to = named[size] if isinstance(size, str) else size % whole if size < 0 else size
    os.truncate(file, to)
    is_a_miss(tmp_path, "never")


def test_a_file_of_zeros_is_set_aside(tmp_path: Path) -> None:
    file = stored(tmp_path)
    file.write_bytes(bytes(file.stat().st_size))
    is_a_miss(tmp_path, kind="foreign or truncated")


@pytest.mark.parametrize("other", ["model", "dtype", "prefix", "tokens"])
@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_file_of_another_chunk_is_set_aside(tmp_path: Path, other: str, verify: str) -> None:
    file = stored(tmp_path)
    strangers = {
        "model": chunk(1, prefix=(1, 2), model="another"),
        "dtype": chunk(1, prefix=(1, 2), dtype=torch.float16),
        "prefix": chunk(1),
        "tokens": chunk(2, prefix=(1, 2)),
    }
    with ChunkStore(tmp_path) as store:
        store.put(strangers[other])
    os.rename(path(tmp_path, strangers[other]), file)
    is_a_miss(tmp_path, verify, "another chunk")


def foreign_safetensors(file: Path) -> None:
    from safetensors.torch import save_file

    save_file({"keys.0": torch.zeros(4)}, file, {"format": "pt"})


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("make", [foreign_safetensors, a_pipe, a_folder, lambda file: file.write_bytes(b"hello" * 99)])
def test_a_foreign_file_under_a_chunks_name_is_set_aside(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(stored(tmp_path))
    is_a_miss(tmp_path)


def a_socket(file: Path, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(file.parent):  # names of sockets must be short
        one.bind(file.name)


def a_link_to_a_broken_file(file: Path, folder: Path) -> None:
    (folder / "elsewhere").write_bytes(b"x" * 1000)
    file.symlink_to(folder / "elsewhere")


def more_than_any_memory(file: Path, folder: Path) -> None:
    file.write_bytes(b"x" * 1000)
    os.truncate(file, 1 << 43)


@pytest.mark.parametrize("verifying", [False, True])
@pytest.mark.parametrize(
    "instead",
    [a_socket, a_link_to_a_broken_file, more_than_any_memory, lambda file, _: file.symlink_to(file.name)],
    ids=["socket", "link to a broken file", "huge", "circle of links"],
)
def test_what_no_chunk_can_be_is_set_aside(
    tmp_path: Path, instead: Callable[[Path, Path], None], verifying: bool
) -> None:
    folder = tmp_path / "store"
    file, one = stored(folder), chunk(1, prefix=(1, 2))
    file.unlink()
    instead(file, tmp_path)
    with ChunkStore(folder) as store:
        assert store.about(one.key.name) is None
        with pytest.warns(UserWarning, match="is not used, set aside"):
            assert len(store.verify_all().broken) == 1 if verifying else store.get(one.key) is None
        assert store.put(one) and same(store.get(one.key), one)


def test_verify_all_reads_everything_and_tells_what_is_broken(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(5):
            store.put(chunk(n))
        flipped(path(tmp_path, chunk(1)), -1)
        os.truncate(path(tmp_path, chunk(2)), 50)
        os.rename(path(tmp_path, chunk(3)), tmp_path / f"{'0' * 64}.safetensors")
        (tmp_path / "notes.txt").write_text("what is this?")
        steps: list[int] = []
        with pytest.warns(UserWarning) as told:
            found = store.verify_all(steps.append)
        kinds = {broken.file: broken.kind for broken in found.broken}
        assert kinds == {
            path(tmp_path, chunk(1)).name: "data changed",
            path(tmp_path, chunk(2)).name: "foreign or truncated",
            "0" * 64 + ".safetensors": "another chunk",
            "notes.txt": "foreign",
        }
        assert found.whole == 2 and sum(steps) == 5 and len(told) == 4
        assert len(list((tmp_path / "set-aside").iterdir())) == 4
        assert store.verify_all().broken == () and same(store.get(chunk(0).key), chunk(0))


def test_a_good_file_put_meanwhile_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, one = stored(tmp_path), chunk(1, prefix=(1, 2))
    flipped(file, -1)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        move = local_module.LocalFolder.set_aside

        def late(self: local_module.LocalFolder, name: str, identity: tuple[int, ...]) -> bool:
            other.remove(one.key)
            other.put(one)
            return move(self, name, identity)

        monkeypatch.setattr(local_module.LocalFolder, "set_aside", late)
        with pytest.warns(UserWarning, match="gone meanwhile"):
            assert store.get(one.key) is None
        assert same(store.get(one.key), one) and not list((tmp_path / "set-aside").iterdir())


def test_what_is_set_aside_has_a_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))
        size = store.entries()[0].bytes
        monkeypatch.setattr(local_module, "SET_ASIDE_BYTES", 2 * size)
        for n in range(5):
            store.put(chunk(n))
            flipped(path(tmp_path, chunk(n)), -1)
            with pytest.warns(UserWarning):
                store.get(chunk(n).key)
    kept = sorted(p.name[21:85] for p in (tmp_path / "set-aside").iterdir())
    assert kept == sorted(chunk(n).key.name for n in (3, 4))


def test_foreign_files_are_moved_and_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the cap, nor by max_bytes, nor by gc; nor do they count for any of these."""
    monkeypatch.setattr(local_module, "SET_ASIDE_BYTES", 10)
    theirs = [f"{n}.txt" for n in range(3)] + [f"{n:064x}.safetensors" for n in range(4)]
    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))
        size = store.entries()[0].bytes
    with ChunkStore(tmp_path, max_bytes=2 * size) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in theirs[:4]:
            (tmp_path / name).write_bytes(b"their own bytes, which no chunk begins with" * 999)
        foreign_safetensors(tmp_path / theirs[4])
        (tmp_path / theirs[5]).mkdir()
        (tmp_path / theirs[6]).symlink_to(tmp_path / theirs[0])
        assert {b.file: b.became for b in store.verify_all().broken} == dict.fromkeys(theirs, "set aside")
        for n in range(1, 4):
            assert store.put(chunk(n))
        assert len(store.entries()) == 2
        assert store.gc(0, set_aside=True).broken == 0
    assert sorted(p.name[21:] for p in (tmp_path / "set-aside").iterdir()) == sorted(f"foreign-{n}" for n in theirs)


@pytest.mark.parametrize(
    "how", ["empty", "zeros", "12 bytes", "60 bytes", "length flipped", "data flipped", "another's"]
)
def test_what_was_a_chunk_of_ours_may_be_deleted_once_broken(tmp_path: Path, how: str) -> None:
    file = stored(tmp_path)
    data = file.read_bytes()
    with ChunkStore(tmp_path) as store:
        store.put(chunk(2))
        others = path(tmp_path, chunk(2)).read_bytes()
        file.write_bytes(
            {
                "empty": b"",
                "zeros": bytes(len(data)),
                "12 bytes": data[:12],
                "60 bytes": data[:60],
                "length flipped": b"\xff" + data[1:],
                "data flipped": data[:-1] + bytes([data[-1] ^ 1]),
                "another's": others,
            }[how]
        )
        with pytest.warns(UserWarning, match="set aside"):
            assert len(store.verify_all().broken) == 1
        assert store.gc().broken == 0  # the newest stays to be looked at
        cleared = store.gc(set_aside=True)
        assert (cleared.broken, cleared.chunks) == (1, 0) and not list((tmp_path / "set-aside").iterdir())
        assert store.report()["broken_removed"] == 1


def test_broken_chunks_go_before_whole_ones(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(3):
            store.put(chunk(n))
        size = store.entries()[0].bytes
    with ChunkStore(tmp_path, max_bytes=3 * size + size // 2) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flipped(path(tmp_path, chunk(0)), -1)
        store.get(chunk(0).key)
        assert len(list((tmp_path / "set-aside").iterdir())) == 1
        assert store.put(chunk(3))  # what was set aside counts, and gives way to it
        assert [chunk(n).key in store for n in range(4)] == [False, True, True, True]
        assert not list((tmp_path / "set-aside").iterdir()) and store.report()["evicted"] == 0
        flipped(path(tmp_path, chunk(1)), -1)
        store.get(chunk(1).key)
        cleared = store.gc(2 * size)
        assert (cleared.broken, cleared.chunks) == (1, 0) and len(store.entries()) == 2


def test_a_folder_under_a_chunks_name_is_told_and_counts_for_nothing(tmp_path: Path) -> None:
    folder = path(tmp_path, chunk(1))
    with ChunkStore(tmp_path) as store:
        folder.mkdir()
        (folder / "letter.txt").write_text("x")
        assert store.entries() == []
        with pytest.warns(UserWarning, match="it is a folder"):
            (told,) = store.verify_all().broken
        assert (told.file, told.kind, told.became) == (folder.name, "foreign", "set aside")
        assert store.put(chunk(1)) and (next((tmp_path / "set-aside").iterdir()) / "letter.txt").read_text() == "x"


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EPERM])
def test_a_file_that_cannot_be_opened_stops_no_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real, bad = os.open, path(tmp_path, chunk(1))
    with ChunkStore(tmp_path) as store:
        for n in range(3):
            store.put(chunk(n))

        def refusing(at: str | Path, *args: int, **named: int) -> int:
            if Path(at) == bad:
                raise OSError(code, os.strerror(code))
            return real(at, *args, **named)

        monkeypatch.setattr(os, "open", refusing)
        with pytest.warns(UserWarning, match="left in place"):
            found = store.verify_all()
        assert found.whole == 2 and bad.exists()
        ((file, kind, why, moved, became),) = found.broken
        assert (file, kind, moved, became) == (bad.name, "unreadable", False, "left in place")
        assert why == os.strerror(code) and store.report()["broken"] == {"unreadable": 1}
        with pytest.raises(StoreError, match=os.strerror(code)):
            store.about(chunk(1).key.name)


def test_a_cap_that_fails_does_not_undo_what_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flipped(stored(tmp_path), -1)

    def refuse(self: local_module.LocalFolder, left: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(local_module.LocalFolder, "_cap_set_aside", refuse)
        with pytest.warns(UserWarning):
            assert [b.became for b in store.verify_all().broken] == ["set aside"]


def test_a_disk_that_fails_to_read_ends_no_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, bad = os.preadv, path(tmp_path, chunk(1))
    with ChunkStore(tmp_path) as store:
        for n in range(3):
            store.put(chunk(n))

        def failing(fd: int, buffers: list[memoryview], at: int) -> int:
            if bad.exists() and os.path.samestat(os.fstat(fd), bad.stat()):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, at)

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.warns(UserWarning, match="fails to read"):
            found = store.verify_all()
        assert found.whole == 2 and [b.kind for b in found.broken] == ["unreadable"] and not bad.exists()


def test_a_folder_under_a_chunks_name_does_not_stop_eviction(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        (tmp_path / f"{'0' * 64}.safetensors").mkdir()
        store.put(chunk(1))
        assert store.gc(0).chunks == 1 and chunk(1).key not in store


def test_a_warning_points_at_the_caller(tmp_path: Path) -> None:
    os.truncate(stored(tmp_path), 60)
    with ChunkStore(tmp_path) as store, pytest.warns(UserWarning) as told:
        store.get(chunk(1, prefix=(1, 2)).key)
    assert told[0].filename == __file__


@pytest.mark.parametrize("at", [-1, 60], ids=["data", "header"])
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_put_over_a_broken_file_replaces_it(tmp_path: Path, verify: str, at: int) -> None:
    """With verify="never" where its structure or key is wrong: as documented, data is not looked at."""
    file, one = stored(tmp_path), chunk(1, prefix=(1, 2))
    flipped(file, at)
    with ChunkStore(tmp_path, verify=verify) as store:  # type: ignore[arg-type]
        if verify == "never" and at == -1:
            assert not store.put(one)
            return
        with pytest.warns(UserWarning, match="is not used, set aside") as told:
            assert store.put(one)
        assert told[0].filename == __file__ and same(store.get(one.key), one)
        assert sum(store.report()["broken"].values()) == sum(store.report()["set_aside"].values()) == 1
        assert not store.put(one) and store.report()["already_there"] == 1


def test_a_put_is_no_first_read(tmp_path: Path) -> None:
    """What a get verifies does not depend on puts before it."""
    file, one = stored(tmp_path), chunk(1, prefix=(1, 2))
    with ChunkStore(tmp_path) as store:
        assert not store.put(one)
        flipped(file, -1)
        with pytest.warns(UserWarning, match="checksum"):
            assert store.get(one.key) is None


def test_foreign_folders_are_told_and_left_alone(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(chunk(1))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "letter.txt").write_text("x")
        for found in (store.verify_all(), store.gc()):
            assert [one.file for one in found.left_alone] == ["mine"]
        assert (tmp_path / "mine" / "letter.txt").exists() and store.verify_all().broken == ()


def test_what_a_dead_process_left_is_told_until_it_is_removed(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        name = f"{chunk(2).key.name}.{'0' * 16}"
        (tmp_path / "writing" / name).write_bytes(b"half a chunk")
        (left,) = store.verify_all().left_alone
        assert left.file == f"writing/{name}" and "dead process" in left.why
        assert store.gc().left_alone == () == store.verify_all().left_alone


def test_a_lock_that_was_deleted_is_named(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(2):
            store.put(chunk(n))
        (tmp_path / LOCK).unlink()
        for work in (lambda: store.put(chunk(2)), store.gc, store.verify_all, lambda: store.remove(chunk(0).key)):
            with pytest.raises(StoreError, match=r"its lock file .* is gone.*open it again"):
                work()
        assert same(store.get(chunk(0).key), chunk(0)) and not (tmp_path / LOCK).exists()
        flipped(path(tmp_path, chunk(1)), -1)
        with pytest.warns(UserWarning, match=r"left in place \(its lock file"):
            assert store.get(chunk(1).key) is None
        with ChunkStore(tmp_path) as again, pytest.warns(UserWarning, match="set aside"):
            assert again.put(chunk(2)) and store.put(chunk(1))  # both have the new lock


@pytest.mark.parametrize("strange", ["letter.txt", "0" * 64, f"{'0' * 64}.txt", f"{'0' * 64}.{'0' * 15}G"])
def test_other_peoples_files_in_writing_are_never_deleted(tmp_path: Path, strange: str) -> None:
    """Nor is a folder that holds such taken for a store to be."""
    (tmp_path / "writing").mkdir()
    theirs = tmp_path / "writing" / strange
    theirs.write_text("theirs")
    for create in (True, False):
        with pytest.raises(StoreError, match="no chunk store"):
            ChunkStore(tmp_path, create=create)
    assert [file.name for file in tmp_path.iterdir()] == ["writing"]
    theirs.unlink()
    with ChunkStore(tmp_path, max_bytes=10**6) as store:
        theirs.write_text("theirs")
        assert store.put(chunk(1))
        for found in (store.gc(), store.gc(0), store.verify_all()):
            (left,) = found.left_alone
            assert left.file == f"writing/{strange}" and "not that of an unfinished chunk" in left.why
    assert theirs.read_text() == "theirs"


def test_a_link_in_the_place_of_writing_is_not_followed_to_remove(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "store"
    other.mkdir()
    theirs = other / f"{'0' * 64}.{'0' * 16}"
    theirs.write_text("theirs")
    folder.mkdir()
    (folder / "writing").symlink_to(other)
    with pytest.raises(StoreError, match="no chunk store"):
        ChunkStore(folder)
    (folder / "writing").unlink()
    with ChunkStore(folder) as store:
        (folder / "writing").rmdir()
        (folder / "writing").symlink_to(other)
        assert store.put(chunk(1))
        assert [left.file for left in store.gc().left_alone] == ["writing"]
    assert theirs.read_text() == "theirs"


def test_a_link_that_leads_nowhere_is_foreign_and_not_overwritten(tmp_path: Path) -> None:
    one, target = chunk(1), tmp_path / "nowhere"
    folder = tmp_path / "store"
    with ChunkStore(folder) as store:
        path(folder, one).symlink_to(target)
        with pytest.warns(UserWarning, match="a link that leads nowhere"):
            assert store.get(one.key) is None
        path(folder, one).symlink_to(target)
        with pytest.warns(UserWarning, match="a link that leads nowhere"):
            assert store.put(one)
        assert same(store.get(one.key), one) and not target.exists()
        aside = sorted((folder / "set-aside").iterdir())
        assert len(aside) == 2 and all(file.is_symlink() and "-foreign-" in file.name for file in aside)
        assert store.gc(set_aside=True).broken == 0


def test_a_link_that_comes_while_a_chunk_is_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, real = chunk(1), writing.fill
    with ChunkStore(tmp_path) as store:

        def fill(*args: Any) -> None:
            path(tmp_path, one).symlink_to(tmp_path / "nowhere")
            real(*args)

        monkeypatch.setattr(writing, "fill", fill)
        assert not store.put(one) and path(tmp_path, one).is_symlink()
