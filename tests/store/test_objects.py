"""Stores behind URLs: the same chunks and the same checks, and by name what is not promised there."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from longreach.errors import StoreError, Unsupported
from longreach.store import ChunkStore
from longreach.store import objects as objects_module
from tests.store.factory import chunk, path, same


@pytest.fixture(params=["memory", "local, as objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any], Any, str]]:
    """(URL, storage_options, filesystem, path in it)"""
    if request.param == "memory":
        fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
        yield f"memory:/{root}", {}, fs, root
        if fs.exists(root):
            fs.rm(root, recursive=True)
    else:
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


def test_foreign_objects_and_the_cap_of_what_is_set_aside(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = place[2]
    monkeypatch.setattr(objects_module, "SET_ASIDE_BYTES", 10)
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.put(chunk(0))
        for n in range(3):
            fs.pipe_file(f"{place[3]}/{n}.txt", b"12345")
        found = store.verify_all()
        assert found.whole == 1 and sorted(b.file for b in found.broken) == ["0.txt", "1.txt", "2.txt"]
        assert len(fs.ls(f"{place[3]}/set-aside")) == 2


def test_the_newest_of_what_is_set_aside_stays_whatever_its_size(
    place: tuple[str, dict[str, Any], Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = place[2]
    monkeypatch.setattr(objects_module, "SET_ASIDE_BYTES", 10)
    with opened(place) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.put(chunk(0))
        fs.pipe_file(f"{place[3]}/large.txt", b"1" * 50)
        store.verify_all()
        assert len(fs.ls(f"{place[3]}/set-aside")) == 1


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
        assert store.promises == ()
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
        assert [n for _, n in puts] == [entry.bytes for entry in store.entries()]


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


@pytest.mark.parametrize("url", ["nonsense://a/b", "memory://a::nonsense://b"])
def test_a_url_that_fsspec_does_not_know(url: str) -> None:
    with pytest.raises(StoreError, match="fsspec cannot open"):
        ChunkStore(url)
