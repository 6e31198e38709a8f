"""Stores behind URLs: the same chunks and the same checks, and by name what is not promised there."""

from __future__ import annotations

import errno
import signal
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from longreach.errors import InvalidInput, StoreError, Unsupported
from longreach.store import ChunkStore
from longreach.store import objects as objects_module
from longreach.store import place as place_module
from tests.store.factory import chunk, in_child, path, same


@pytest.fixture(params=["memory", "local, as objects"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Any], Any, str]]:
    """(URL, storage_options, filesystem, path in it). Folders as objects, with puts in pieces, are let in only here."""
    if request.param == "memory":
        fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
        yield f"memory:/{root}", {}, fs, root
        if fs.exists(root):
            fs.rm(root, recursive=True)
    else:
        monkeypatch.setattr(place_module, "ATOMIC", (*place_module.ATOMIC, "dir"))
        options = {"path": str(tmp_path), "target_protocol": "file", "target_options": {"auto_mkdir": True}}
        yield "dir://store", options, fsspec.filesystem("file"), f"{tmp_path}/store"


def opened(place: tuple[str, dict[str, Any], Any, str], **options: Any) -> ChunkStore:
    return ChunkStore(place[0], storage_options=place[1], **options)


def test_chunks_come_back_from_another_opening(place: tuple[str, dict[str, Any], Any, str]) -> None:
    one = chunk(1, prefix=(1,))
    with opened(place) as store:
        assert store.get(one.key) is None and one.key not in store and store.entries() == []
        assert store.put(one) and not store.put(one)
    with opened(place) as store:
        got = store.get(one.key)
        assert same(got, one) and one.key in store
        assert got is not None
        got.keys[0].zero_()
        assert same(store.get(one.key), one) and store.report()["verified"] == 2  # each read brings new bytes
        (entry,) = store.entries()
        assert entry.name == one.key.name and entry.last_used is None
        assert entry.bytes == place[2].size(f"{place[3]}/{one.key.name}.safetensors")
        about = store.about(entry.name)
        assert about is not None and about.key == one.key
        assert store.verify_all().whole == 1
        assert store.gc().chunks == 0
        assert store.remove(one.key) and not store.remove(one.key) and store.get(one.key) is None


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "another's"])
def test_a_broken_object_is_a_miss_and_set_aside(place: tuple[str, dict[str, Any], Any, str], how: str) -> None:
    fs, file = place[2], f"{place[3]}/{chunk(1).key.name}.safetensors"
    with opened(place) as store:
        store.put(chunk(1))
        data = bytearray(fs.cat_file(file))
        data[-1] ^= 1
        store.put(chunk(2))
        others = fs.cat_file(f"{place[3]}/{chunk(2).key.name}.safetensors")
        fs.pipe_file(file, {"flipped": bytes(data), "truncated": data[:-9], "empty": b"", "another's": others}[how])
        with pytest.warns(UserWarning, match="set aside"):
            assert store.get(chunk(1).key) is None
        assert len(fs.ls(f"{place[3]}/set-aside")) == 1 and sum(store.report()["set_aside"].values()) == 1
        assert store.put(chunk(1)) and same(store.get(chunk(1).key), chunk(1))


def test_a_put_over_a_broken_object_replaces_it(place: tuple[str, dict[str, Any], Any, str]) -> None:
    fs, file = place[2], f"{place[3]}/{chunk(1).key.name}.safetensors"
    with opened(place) as store:
        store.put(chunk(1))
        fs.pipe_file(file, fs.cat_file(file)[:-8])
        with pytest.warns(UserWarning, match="set aside"):
            assert store.put(chunk(1))
        assert same(store.get(chunk(1).key), chunk(1))


def test_foreign_folders_are_told_and_left_alone(place: tuple[str, dict[str, Any], Any, str]) -> None:
    fs = place[2]
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.put(chunk(0))
        fs.pipe_file(f"{place[3]}/stray.txt", b"x")
        fs.makedirs(f"{place[3]}/mine")
        fs.pipe_file(f"{place[3]}/mine/letter.txt", b"x")
        for found in (store.verify_all(), store.gc()):  # the first makes set-aside/
            assert [one.file for one in found.left_alone] == ["mine"]
        assert fs.exists(f"{place[3]}/mine/letter.txt")


def test_foreign_objects_are_moved_and_never_deleted(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, theirs = place[2], f"{'0' * 64}.safetensors"
    monkeypatch.setattr(objects_module, "SET_ASIDE_BYTES", 10)
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.put(chunk(0))
        for name in ("0.txt", "1.txt", theirs):
            fs.pipe_file(f"{place[3]}/{name}", b"their own bytes, which no chunk begins with" * 9)
        found = store.verify_all()
        assert found.whole == 1 and sorted(b.file for b in found.broken) == ["0.txt", theirs, "1.txt"]
        for n in range(1, 4):
            store.put(chunk(n))
            file = f"{place[3]}/{chunk(n).key.name}.safetensors"
            fs.pipe_file(file, fs.cat_file(file)[:-8])
            store.get(chunk(n).key)
        names = [f.rsplit("/", 1)[-1][21:] for f in fs.ls(f"{place[3]}/set-aside", detail=False)]
        foreign = [f"foreign-{name}" for name in ("0.txt", "1.txt", theirs)]
        assert sorted(names) == sorted([*foreign, f"{chunk(3).key.name}.safetensors"])  # the newest, whatever its size
        cleared = store.gc(set_aside=True)
        assert cleared.broken == 1 and cleared.broken_bytes > 0
        assert len(fs.ls(f"{place[3]}/set-aside")) == 3


def test_an_empty_object_is_set_aside(place: tuple[str, dict[str, Any], Any, str]) -> None:
    fs = place[2]
    with opened(place) as store:
        store.put(chunk(0))
        fs.pipe_file(f"{place[3]}/{chunk(1).key.name}.safetensors", b"")
        with pytest.warns(UserWarning, match="set aside"):
            assert store.get(chunk(1).key) is None
        assert store.gc(set_aside=True).broken == 1


def test_a_place_of_other_objects_is_not_taken_over(place: tuple[str, dict[str, Any], Any, str]) -> None:
    url, options, fs, root = place
    fs.makedirs(root)
    fs.pipe_file(f"{root}/letters.txt", b"x" * 100)
    for create in (True, False):
        with pytest.raises(StoreError, match="no chunk store"):
            ChunkStore(url, storage_options=options, create=create)
    assert [f.rsplit("/", 1)[-1] for f in fs.ls(root, detail=False)] == ["letters.txt"]


def test_a_store_behind_a_url_is_one_from_its_first_put(place: tuple[str, dict[str, Any], Any, str]) -> None:
    url, options, fs, root = place
    with opened(place) as store:
        with pytest.raises(StoreError, match=r"no chunk store at .*longreach store add"):
            ChunkStore(url, storage_options=options, create=False)
        store.put(chunk(0))
        fs.pipe_file(f"{root}/later.txt", b"x")
        with ChunkStore(url, storage_options=options, create=False) as again:
            assert same(again.get(chunk(0).key), chunk(0))
        fs.rm_file(f"{root}/.longreach-chunk-store")
        with pytest.warns(UserWarning, match="left in place"):
            assert [b.moved for b in store.verify_all().broken] == [False]
        assert fs.exists(f"{root}/later.txt")


def test_a_folder_under_a_chunks_name(place: tuple[str, dict[str, Any], Any, str]) -> None:
    fs, one = place[2], chunk(1)
    with opened(place) as store:
        store.put(chunk(0))
        fs.makedirs(f"{place[3]}/{one.key.name}.safetensors")
        fs.pipe_file(f"{place[3]}/{one.key.name}.safetensors/letter.txt", b"x")
        assert one.key not in store and len(store.entries()) == 1
        assert [left.file for left in store.verify_all().left_alone] == [f"{one.key.name}.safetensors"]
        with pytest.raises(StoreError):
            store.put(one)
        assert fs.cat_file(f"{place[3]}/{one.key.name}.safetensors/letter.txt") == b"x"


def test_an_object_that_cannot_be_read_stops_no_verification(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(place) as store:
        for n in range(3):
            store.put(chunk(n))
        real, bad = objects_module.Objects.read, chunk(1).key.name

        def read(self: Any, name: str) -> Any:
            if name == bad:
                raise PermissionError(errno.EACCES, "Access Denied")
            return real(self, name)

        monkeypatch.setattr(objects_module.Objects, "read", read)
        with pytest.warns(UserWarning, match="left in place: Access Denied"):
            found = store.verify_all()
        assert found.whole == 2 and [(b.kind, b.moved) for b in found.broken] == [("unreadable", False)]


def test_two_that_cap_what_is_set_aside_at_once(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that another process has deleted meanwhile is no fault."""
    fs = place[2]
    monkeypatch.setattr(objects_module, "SET_ASIDE_BYTES", 10)
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(2):
            store.put(chunk(n))
            file = f"{place[3]}/{chunk(n).key.name}.safetensors"
            fs.pipe_file(file, fs.cat_file(file)[:-8])
        store.get(chunk(0).key)
        real = objects_module.Objects._files

        def files(self: Any, folder: str, kind: str = "file") -> dict[str, int]:
            found = real(self, folder, kind)
            if folder == self.aside:
                for name in found:
                    fs.rm_file(f"{folder}/{name}")
            return found

        monkeypatch.setattr(objects_module.Objects, "_files", files)
        (told,) = store.verify_all().broken
        assert told.became == "set aside"


class AsyncMemory(AsyncFileSystem):  # type: ignore[misc]
    """As those of services: bound to the process that made it. Objects are in a file that processes share."""

    protocol = "asyncmemory"
    cachable = True

    async def _there(self) -> Any:
        return fsspec.filesystem("dir", path=self.storage_options["folder"], target_protocol="file")

    async def _info(self, path: str, **named: Any) -> Any:
        return (await self._there()).info(path)

    async def _ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        return (await self._there()).ls(path, detail=detail)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> Any:
        return (await self._there()).cat_file(path, start=start, end=end)

    async def _pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        (await self._there()).pipe_file(path, value)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        (await self._there()).makedirs(path, exist_ok=exist_ok)


def test_a_forked_child_opens_the_place_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("asyncmemory", AsyncMemory, clobber=True)
    monkeypatch.setattr(place_module, "ATOMIC", (*place_module.ATOMIC, "asyncmemory"))
    with ChunkStore("asyncmemory://store", storage_options={"folder": str(tmp_path)}) as store:
        assert store.put(chunk(0)) and same(store.get(chunk(0).key), chunk(0))

        def child() -> None:
            signal.alarm(60)
            assert same(store.get(chunk(0).key), chunk(0)) and store.put(chunk(1))

        assert in_child(child) == 0
        assert same(store.get(chunk(1).key), chunk(1))


def test_looking_makes_nothing_and_what_others_removed_is_put_again(
    place: tuple[str, dict[str, Any], Any, str],
) -> None:
    fs = place[2]
    with opened(place) as store:
        assert store.entries() == [] and store.get(chunk(0).key) is None and not fs.exists(place[3])
        assert store.put(chunk(0)) and len(store.entries()) == 1
        for file in fs.ls(place[3], detail=False):
            fs.rm(file, recursive=True)
        assert store.put(chunk(0)) and same(store.get(chunk(0).key), chunk(0))


def test_what_is_not_promised_is_refused_by_name(place: tuple[str, dict[str, Any], Any, str]) -> None:
    with pytest.raises(Unsupported, match="size cap with LRU"):
        opened(place, max_bytes=10**9)
    with opened(place) as store:
        assert store.promises == ("atomic puts",)
        store.require("atomic puts")
        for promise in ("memory mapping", "fsync and rename", "a size cap with LRU", "several processes"):
            with pytest.raises(Unsupported, match=promise):
                store.require(promise)
        with pytest.raises(Unsupported, match="size cap with LRU"):
            store.gc(0)


def test_a_url_of_local_files_is_a_local_store(tmp_path: Path) -> None:
    with ChunkStore(f"file://{tmp_path}/store", max_bytes=10**9) as store:
        store.require("memory mapping", "several processes")
        store.put(chunk(1))
    assert path(tmp_path / "store", chunk(1)).is_file()
    with ChunkStore(tmp_path / "store") as store:
        assert same(store.get(chunk(1).key), chunk(1))


def test_each_chunk_is_one_put(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    puts: list[tuple[str, int]] = []
    real = MemoryFileSystem.pipe_file

    def counted(self: Any, to: str, value: bytes, **named: Any) -> Any:
        puts.append((to, len(value)))
        return real(self, to, value, **named)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", counted)
    with ChunkStore(f"memory://{uuid.uuid4().hex}") as store:
        store.put(chunk(1))
        store.put(chunk(2))
        chunks = [n for to, n in puts if to.endswith(".safetensors")]
        assert chunks == [entry.bytes for entry in store.entries()] and len(puts) == 3  # and what makes it a store


def test_errors_of_a_service_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class Refused(Exception):
        """As a cloud library raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused("no credentials")

    with ChunkStore(f"memory://{uuid.uuid4().hex}") as store:
        for name in ("cat_file", "pipe_file", "ls", "rm_file"):
            monkeypatch.setattr(MemoryFileSystem, name, refuse)
        for work in (
            lambda: store.get(chunk(1).key),
            lambda: store.put(chunk(1)),
            store.entries,
            lambda: store.remove(chunk(1).key),
        ):
            with pytest.raises(StoreError, match=r"no credentials.*go on without"):
                work()


def test_a_url_that_fsspec_does_not_know() -> None:
    with pytest.raises(StoreError, match="fsspec cannot open"):
        ChunkStore("nonsense://a/b")


@pytest.mark.parametrize("name", ["*", "*.safetensors", "?" * 64 + ".safetensors", "[0-9a-f]*", "a[b]?.txt", "**"])
def test_names_are_no_patterns(place: tuple[str, dict[str, Any], Any, str], name: str) -> None:
    """A foreign object that is called like a pattern is moved alone."""
    fs, theirs = place[2], b"their own bytes"
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(3):
            store.put(chunk(n))
        fs.pipe_file(f"{place[3]}/{name}", theirs)
        found = store.verify_all()
        assert found.whole == 3 and [(b.file, b.moved) for b in found.broken] == [(name, True)]
        assert all(same(store.get(chunk(n).key), chunk(n)) for n in range(3))
        (aside,) = fs.ls(f"{place[3]}/set-aside", detail=False)
        assert aside.endswith(f"-foreign-{name}") and fs.cat_file(aside) == theirs


@pytest.mark.parametrize("odd", ["a*", "a?", "[ab]c", "a**"])
def test_a_root_is_no_pattern(odd: str) -> None:
    fs, base, neighbour = (
        fsspec.filesystem("memory"),
        f"/{uuid.uuid4().hex}",
        {"a?": "ab", "[ab]c": "ac"}.get(odd, "abc"),
    )
    with ChunkStore(f"memory:/{base}/{neighbour}") as near, ChunkStore(f"memory:/{base}/{odd}") as store:
        for each in (near, store):
            each.put(chunk(0))
        for folder in (odd, neighbour):
            fs.pipe_file(f"{base}/{folder}/0.txt", b"x")
        with pytest.warns(UserWarning, match="set aside"):
            assert [b.moved for b in store.verify_all().broken] == [True]
        assert fs.exists(f"{base}/{neighbour}/0.txt") and not fs.exists(f"{base}/{neighbour}/set-aside")
        file = f"{base}/{odd}/{chunk(0).key.name}.safetensors"
        fs.pipe_file(file, fs.cat_file(file)[:-8])
        with pytest.warns(UserWarning, match="set aside"):
            assert store.get(chunk(0).key) is None
        store.gc(set_aside=True)
        assert same(near.get(chunk(0).key), chunk(0))
        assert store.put(chunk(0)) and store.remove(chunk(0).key)
        assert same(near.get(chunk(0).key), chunk(0))


def test_what_is_there_is_not_said_to_be_gone(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = place[2]
    with opened(place) as store:
        store.put(chunk(0))
        fs.pipe_file(f"{place[3]}/0.txt", b"x")

        def lost(*_: Any, **__: Any) -> None:
            raise FileNotFoundError("no such bucket")

        monkeypatch.setattr(type(store._files._fs), "cp_file", lost)  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match="left in place .*no such bucket"):
            assert [b.moved for b in store.verify_all().broken] == [False]


def test_a_copy_that_is_not_whole_replaces_nothing(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = place[2]
    with opened(place) as store:
        store.put(chunk(0))
        fs.pipe_file(f"{place[3]}/0.txt", b"xyz")
        kind = type(store._files._fs)  # type: ignore[union-attr]
        monkeypatch.setattr(kind, "cp_file", lambda self, one, other: self.pipe_file(other, b"x"))
        with pytest.warns(UserWarning, match="left in place .*not whole"):
            assert [b.moved for b in store.verify_all().broken] == [False]
        assert fs.cat_file(f"{place[3]}/0.txt") == b"xyz"


def test_a_place_of_chunks_alone_is_marked_before_it_is_changed(place: tuple[str, dict[str, Any], Any, str]) -> None:
    """As where only chunks were copied there."""
    fs, root = place[2], place[3]
    with opened(place) as store:
        for n in range(2):
            store.put(chunk(n))
    file = f"{root}/{chunk(0).key.name}.safetensors"
    fs.pipe_file(file, fs.cat_file(file)[:-8])
    fs.rm_file(f"{root}/.longreach-chunk-store")
    with opened(place) as store, pytest.warns(UserWarning, match="set aside"):
        assert store.get(chunk(0).key) is None
        assert fs.exists(f"{root}/.longreach-chunk-store")
        assert store.put(chunk(0)) and same(store.get(chunk(0).key), chunk(0))


def test_what_others_put_before_the_first_chunk_keeps_the_place_theirs(
    place: tuple[str, dict[str, Any], Any, str],
) -> None:
    fs, root = place[2], place[3]
    with opened(place) as store:
        fs.makedirs(root)
        fs.pipe_file(f"{root}/letters.txt", b"x")
        with pytest.raises(StoreError, match=r"no chunk store.*letters\.txt"):
            store.put(chunk(0))
    assert [f.rsplit("/", 1)[-1] for f in fs.ls(root, detail=False)] == ["letters.txt"]


def test_a_place_that_is_an_object_is_refused() -> None:
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    fs.pipe_file(root, b"x")
    for create in (True, False):
        with pytest.raises(StoreError, match="is an object"):
            ChunkStore(f"memory:/{root}", create=create)
    assert fs.cat_file(root) == b"x"


def test_an_error_of_a_service_at_opening_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(AsyncMemory, "__init__", refuse)
    fsspec.register_implementation("asyncmemory", AsyncMemory, clobber=True)
    monkeypatch.setattr(place_module, "ATOMIC", (*place_module.ATOMIC, "asyncmemory"))
    with pytest.raises(StoreError, match=r"asyncmemory answered RuntimeError: no credentials"):
        ChunkStore("asyncmemory://store")


def test_a_library_that_cuts_a_url_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of some services take ? and # for the ends of paths."""
    import fsspec.core

    real = fsspec.core.url_to_fs
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **named: real(url.partition("?")[0], **named))
    with pytest.raises(InvalidInput, match=r"looks at '/a'"):
        ChunkStore("memory://a?b")


def test_an_object_that_may_not_be_removed_does_not_stop_gc(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = place[2]
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(3):
            store.put(chunk(n))
            file = f"{place[3]}/{chunk(n).key.name}.safetensors"
            fs.pipe_file(file, fs.cat_file(file)[:-8])
            store.get(chunk(n).key)
        kind = type(store._files._fs)  # type: ignore[union-attr]
        real = kind.rm_file

        def refuse(self: Any, path: str) -> None:
            if chunk(1).key.name in path:
                raise PermissionError(errno.EACCES, "Access Denied")
            real(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "rm_file", refuse)
            found = store.gc(set_aside=True)
        assert found.broken == 2 and [left.why for left in found.left_alone] == ["may not be removed: Access Denied"]
