"""What goes in comes out; what is old gives way; nothing is used that is not whole."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from longreach.errors import InvalidInput, StoreError, StoreFull, UnknownName
from longreach.store import ChunkStore, layout, writing
from tests.store.factory import chunk, path, same, size


def names(store: ChunkStore) -> list[str]:
    return [entry.name for entry in store.entries()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("prefix", [(), (3, 4, 5)])
def test_a_chunk_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype, prefix: tuple[int, ...]) -> None:
    one = chunk(1, tokens=5, dtype=dtype, prefix=prefix, layers=3)
    one.keys[0][0, 0, 0] = float("nan")
    with ChunkStore(tmp_path) as store:
        assert one.key not in store and store.get(one.key) is None
        assert store.put(one) and one.key in store
        got = store.get(one.key)
        assert got is not None and torch.isnan(got.keys[0][0, 0, 0])
        got.keys[0][0, 0, 0] = one.keys[0][0, 0, 0] = 0
        assert same(got, one)
        about = store.about(one.key.name)
    assert about is not None and about == (one.key, 5, len(prefix), 3, False)


def test_tensors_may_be_strided_and_need_gradients(tmp_path: Path) -> None:
    one = chunk(1, tokens=4)
    wide = [torch.randn(4, 8, 2).bfloat16().requires_grad_().transpose(0, 2)[:, :, ::2] for _ in one.keys]
    strided = type(one).of("m", (), one.tokens, [w[:, :4] for w in wide], [w[:, 4:] for w in wide])
    with ChunkStore(tmp_path) as store:
        store.put(strided)
        assert same(store.get(strided.key), strided)


def test_a_tensor_that_is_kept_negated(tmp_path: Path) -> None:
    one = chunk(1, dtype=torch.float32)
    keys = tuple(torch._neg_view(k) for k in one.keys)
    assert all(k.is_neg() for k in keys)
    with ChunkStore(tmp_path) as store:
        store.put(replace(one, keys=keys))
        got = store.get(one.key)
    assert got is not None and all(torch.equal(a, -b) for a, b in zip(got.keys, one.keys, strict=True))


def test_a_header_that_no_reader_takes_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = chunk(1)
    length = len(layout.encode(one)[0]) - 8
    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(layout, "MOST_HEADER", length - 8)
        with pytest.raises(InvalidInput, match="has a header of"):
            store.put(one)
        assert store.entries() == []
        monkeypatch.setattr(layout, "MOST_HEADER", length)
        assert store.put(one) and same(store.get(one.key), one)


def test_writing_to_what_was_got_changes_no_file(tmp_path: Path) -> None:
    one = chunk(1)
    with ChunkStore(tmp_path, verify="always") as store:
        store.put(one)
        got = store.get(one.key)
        assert got is not None
        got.values[1].zero_()
        assert same(store.get(one.key), one)


def test_what_was_got_outlives_file_and_store(tmp_path: Path) -> None:
    one = chunk(1)
    with ChunkStore(tmp_path) as store:
        store.put(one)
        got = store.get(one.key)
        assert store.remove(one.key) and not store.remove(one.key)
        assert store.get(one.key) is None
    assert same(got, one)


def test_reads_keep_no_file_open(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(8):
            store.put(chunk(n))
        before = len(os.listdir("/dev/fd"))
        held = [store.get(chunk(n).key) for n in range(8)]
        assert all(held) and len(os.listdir("/dev/fd")) == before


def test_any_reader_of_safetensors_reads_a_chunk(tmp_path: Path) -> None:
    one = chunk(2, prefix=(9,))
    with ChunkStore(tmp_path) as store:
        store.put(one)
    with safe_open(path(tmp_path, one), "pt") as file:
        assert file.metadata()["model"] == "a model"
        assert torch.equal(file.get_tensor("tokens"), one.tokens)
        assert torch.equal(file.get_tensor("prefix"), one.prefix)
        for i, (k, v) in enumerate(zip(one.keys, one.values)):
            assert torch.equal(file.get_tensor(f"keys.{i}"), k) and torch.equal(file.get_tensor(f"values.{i}"), v)


def test_a_second_put_changes_nothing(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        assert store.put(chunk(1))
        before = path(tmp_path, chunk(1)).stat()
        assert not store.put(chunk(1))
        after = path(tmp_path, chunk(1)).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert store.report()["put"] == store.report()["already_there"] == 1


def test_the_longest_unused_gives_way_also_after_a_restart(tmp_path: Path) -> None:
    room = 3 * size(chunk(0), tmp_path)
    folder = tmp_path / "store"
    with ChunkStore(folder, max_bytes=room) as store:
        for n in range(3):
            store.put(chunk(n))
        store.get(chunk(0).key)  # the oldest is used, so 1 is next to go
    with ChunkStore(folder, max_bytes=room) as store:
        store.put(chunk(3))
        assert [chunk(n).key in store for n in range(4)] == [True, False, True, True]
        store.put(chunk(2))  # there already: a use
        store.put(chunk(4))
        assert [chunk(n).key in store for n in range(5)] == [False, False, True, True, True]
        assert sum(entry.bytes for entry in store.entries()) <= room
        assert store.report()["evicted"] == 2


def test_looking_is_no_use(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(3):
            store.put(chunk(n))
            os.utime(path(tmp_path, chunk(n)), (1000 + n, 2000))
        before = names(store)
        assert before == [chunk(n).key.name for n in range(3)]
        assert chunk(0).key in store and store.about(before[0])
        assert store.verify_all().whole == 3
        assert names(store) == before and store.entries()[0].last_used == 1000
        started = time.time()
        store.get(chunk(0).key)
        assert names(store)[-1] == before[0] and (store.entries()[-1].last_used or 0) >= started


def test_a_chunk_larger_than_the_store_is_refused_and_nothing_evicted(tmp_path: Path) -> None:
    small = size(chunk(0), tmp_path)
    with ChunkStore(tmp_path / "store", max_bytes=small) as store:
        store.put(chunk(0))
        with pytest.raises(StoreFull, match="max_bytes"):
            store.put(chunk(1, tokens=40))
        assert chunk(0).key in store and not list((tmp_path / "store" / "writing").iterdir())


def test_gc_brings_a_store_down_to_a_size(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(4):
            store.put(chunk(n))
        total, steps = sum(e.bytes for e in store.entries()), list[int]()
        assert store.gc().chunks == 0
        removed = store.gc(total // 2, steps.append)
        assert removed.chunks == 2 == sum(steps) and removed.bytes == total - sum(e.bytes for e in store.entries())
        assert names(store) == [chunk(n).key.name for n in (2, 3)]
        assert store.gc(0).chunks == 2 and not store.entries()


def test_checksums_are_compared_when_verify_says(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(chunk(1))
    for verify, times in (("first", 1), ("always", 2), ("never", 0)):
        with ChunkStore(tmp_path, verify=verify) as store:  # type: ignore[arg-type]
            assert store.get(chunk(1).key) and store.get(chunk(1).key)
            assert store.report()["verified"] == times


def test_another_file_of_the_name_is_verified_anew(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        store.put(chunk(1))
        assert store.get(chunk(1).key)
        other.remove(chunk(1).key)
        other.put(chunk(1))
        assert store.get(chunk(1).key) and store.report()["verified"] == 2


def test_a_closed_store_is_refused(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    store.close()
    with pytest.raises(InvalidInput, match="closed"):
        store.get(chunk(1).key)


@pytest.mark.parametrize("wrong", [-5, "100", 1.5, True])
def test_gc_to_no_size_is_refused(tmp_path: Path, wrong: object) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))
        with pytest.raises(InvalidInput, match="max_bytes: expected a number of bytes, at least 0"):
            store.gc(wrong)  # type: ignore[arg-type]
        assert chunk(0).key in store


@pytest.mark.parametrize("others", [False, True], ids=["there before", "came meanwhile"])
def test_what_another_put_is_on_disk_too_when_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """Who renamed the file may have been killed before the folder was synced."""
    synced: list[Path] = []
    with ChunkStore(tmp_path) as store:
        if others:
            monkeypatch.setattr(ChunkStore, "_there", lambda *_: False)
        store.put(chunk(1))
        monkeypatch.setattr(writing, "sync_folder", synced.append)
        assert not store.put(chunk(1)) and tmp_path in synced


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="first, always, never"):
        ChunkStore(tmp_path, verify="sometimes")  # type: ignore[arg-type]
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InvalidInput, match="max_bytes"):
            ChunkStore(tmp_path, max_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="location"):
        ChunkStore("")
    with pytest.raises(InvalidInput, match="storage_options"):
        ChunkStore(tmp_path, storage_options={"anon": True})
    with pytest.raises(UnknownName, match="memory mapping"):
        ChunkStore(tmp_path).require("speed")
    ChunkStore(tmp_path).require("memory mapping", "fsync and rename", "a size cap with LRU", "several processes")


def test_a_folder_of_other_files_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"letters\.txt"):
        ChunkStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letters.txt"]
    with pytest.raises(StoreError, match="letters"):
        ChunkStore(tmp_path / "letters.txt")


def test_a_store_without_lock_and_folders_is_still_a_store(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(chunk(1))
    (tmp_path / ".longreach-chunk-store").unlink()
    (tmp_path / "writing").rmdir()
    (tmp_path / "set-aside").rmdir()
    with ChunkStore(tmp_path) as store:
        assert same(store.get(chunk(1).key), chunk(1)) and store.put(chunk(2))
        (tmp_path / "writing").rmdir()
        (tmp_path / "set-aside").rmdir()
        assert store.put(chunk(3)) and store.gc().chunks == 0


def test_a_store_that_vanished_is_an_error(tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store") as store:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        assert store.get(chunk(1).key) is None
        with pytest.raises(StoreError, match="go on without"):
            store.put(chunk(1))
