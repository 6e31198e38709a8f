"""Dependence in a chunk's file: optional, checked as all else, kept by every put, and no part of a key."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from longreach.errors import InvalidInput, StoreError
from longreach.store import ChunkStore, writing
from longreach.store import local as local_module
from longreach.store.layout import encode
from longreach.store.local import LocalFolder
from tests.store.factory import chunk, die, in_child, path, same, size

PLAIN, FULL = chunk(1, tokens=5, prefix=(1, 2)), chunk(1, tokens=5, prefix=(1, 2), dependence=True)


def places(tmp_path: Path) -> tuple[str, ...]:
    return str(tmp_path / "store"), f"memory://{tmp_path.name}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_it_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    one = chunk(7, tokens=tokens, dtype=dtype, prefix=(1, 2, 3), layers=3, dependence=True)
    for place in places(tmp_path):
        with ChunkStore(place) as store:
            assert store.put(one)
        with ChunkStore(place) as store:
            got, about = store.get(one.key), store.about(one.key.name)
            assert same(got, one) and about is not None and about.dependence and about.layers == 3
            assert about.tokens == tokens and store.verify_all().whole == 1
    with safetensors.safe_open(path(tmp_path / "store", one), "pt") as file:
        assert torch.equal(file.get_tensor("dependence"), one.dependence) and list(file.keys())


def test_it_is_in_no_key_and_files_without_it_are_as_before(tmp_path: Path) -> None:
    assert PLAIN.key == FULL.key and PLAIN.bytes == FULL.bytes
    with ChunkStore(tmp_path) as store:
        store.put(PLAIN)
        about = store.about(PLAIN.key.name)
        assert about is not None and not about.dependence
    header = path(tmp_path, PLAIN).read_bytes()
    assert b"dependence" not in header and header.startswith(encode(PLAIN)[0])


def test_a_chunk_with_it_replaces_one_without_and_not_the_other_way_round(tmp_path: Path) -> None:
    for place in places(tmp_path):
        with ChunkStore(place) as store:
            assert store.put(PLAIN)
            before = store.get(PLAIN.key)
            assert store.put(FULL) and same(store.get(FULL.key), FULL)
            assert not store.put(FULL) and not store.put(PLAIN) and same(store.get(FULL.key), FULL)
            assert same(before, PLAIN), "what was handed out before stays as it is"
            assert len(store.entries()) == 1 and store.verify_all().whole == 1
            told = store.report()
            assert (told["put"], told["already_there"], told["broken"]) == (2, 2, {})
    assert not list((tmp_path / "store" / "writing").iterdir())


def test_a_link_to_a_chunk_without_it_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store") as store:
        store.put(PLAIN)
        file, elsewhere = path(tmp_path / "store", PLAIN), tmp_path / "elsewhere"
        os.rename(file, elsewhere)
        file.symlink_to(elsewhere)
        kept = elsewhere.read_bytes()
        assert store.put(FULL) and same(store.get(FULL.key), FULL)
        assert elsewhere.read_bytes() == kept and not file.is_symlink()


@pytest.mark.parametrize("meanwhile", ["without", "with", "nothing", "always another"])
def test_what_others_put_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """Another file without it is replaced too, one with it stays, and nobody tries for ever."""
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        store.put(PLAIN)
        fill, calls = writing.fill, list[int]()

        def filling(*args: Any) -> None:
            fill(*args)
            calls.append(1)
            if len(calls) == 1 or meanwhile == "always another":
                with monkeypatch.context() as patch:
                    patch.setattr(writing, "fill", fill)
                    other.remove(PLAIN.key)
                    if meanwhile != "nothing":
                        other.put(FULL if meanwhile == "with" else PLAIN)

        monkeypatch.setattr(writing, "fill", filling)
        assert store.put(FULL) == (meanwhile in ("without", "nothing"))
        assert len(calls) == {"without": 2, "with": 1, "nothing": 1, "always another": 3}[meanwhile]
        assert same(store.get(FULL.key), PLAIN if meanwhile == "always another" else FULL)
    assert not list((tmp_path / "writing").iterdir())


STEPS: dict[str, tuple[object, str, Callable[..., Any], bool]] = {  # where, what is replaced by what, whether it is new
    "temporary file created": (writing, "reserve", lambda *_: die(), False),
    "before fsync": (os, "fsync", lambda *_: die(), False),
    "before rename": (os, "rename", lambda *_: die(), False),
    "before the folder is synced": (writing, "sync_folder", lambda *_: die(), True),
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_while_it_replaces(tmp_path: Path, step: str) -> None:
    where, name, instead, new = STEPS[step]
    with ChunkStore(tmp_path) as store:
        store.put(PLAIN)

        def child() -> None:
            setattr(where, name, instead)
            store.put(FULL)

        assert in_child(child) < 0
    with ChunkStore(tmp_path, verify="always") as store:
        assert same(store.get(PLAIN.key), FULL if new else PLAIN)
        assert store.put(FULL) != new and same(store.get(FULL.key), FULL)


def test_under_a_cap_the_one_that_is_replaced_gives_way_first(tmp_path: Path) -> None:
    """Else adding it to all chunks of a full store would throw out, each time, the one that comes next."""
    room = 3 * size(FULL, tmp_path)
    with ChunkStore(tmp_path / "store", max_bytes=room) as store:
        ones = [(chunk(n, tokens=5), chunk(n, tokens=5, dependence=True)) for n in range(1, 4)]
        for plain, _ in ones:
            store.put(plain)
        for _, full in ones:
            assert store.put(full)
        assert all(same(store.get(full.key), full) for _, full in ones)
        assert sum(e.bytes for e in store.entries()) <= room


@pytest.mark.parametrize("verify", ["first", "never"])
def test_numbers_that_changed_on_the_disk_make_the_file_broken(tmp_path: Path, verify: Any) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(FULL)
    file = path(tmp_path, FULL)
    data = bytearray(file.read_bytes())
    assert FULL.dependence is not None
    at = data.index(FULL.dependence.numpy().tobytes())
    data[at + 6 : at + 8] = b"\xff\xff"  # NaN: seen even where checksums are not compared
    file.write_bytes(data)
    with ChunkStore(tmp_path, verify=verify) as store, pytest.warns(UserWarning, match="set aside"):
        assert store.get(FULL.key) is None
        assert store.put(FULL) and same(store.get(FULL.key), FULL)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(5), r"expected float64 \[5\], got float32"),
        (torch.zeros(4, dtype=torch.float64), r"expected float64 \[5\], got float64 \[4\]"),
        (torch.full((5,), torch.nan, dtype=torch.float64), "expected finite numbers of at least 0"),
        (torch.full((5,), torch.inf, dtype=torch.float64), "expected finite numbers of at least 0"),
        (torch.full((5,), -1.0, dtype=torch.float64), "expected finite numbers of at least 0"),
        (torch.zeros(5, dtype=torch.float64, device="meta"), "the meta device"),
    ],
)
def test_numbers_that_are_none(value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, dependence=value)


# loading into memory


def test_what_is_loaded_survives_its_file(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(FULL)
        got = store.load(FULL.key)
        os.truncate(path(tmp_path, FULL), 0)
        assert same(got.chunk, FULL) and got.broken is None and store.report()["hits"] == 1
        with pytest.warns(UserWarning, match="set aside"):
            again = store.load(FULL.key)
        assert again.chunk is None and again.broken is not None and store.load(FULL.key) == (None, None)


def test_a_disk_that_fails_to_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, size: int) -> Any:
        raise OSError(5, "Input/output error")

    with ChunkStore(tmp_path) as store:
        store.put(FULL)
        monkeypatch.setattr(local_module, "_load", fails)
        with pytest.warns(UserWarning, match="the disk fails to read it"):
            got = store.load(FULL.key)
        assert got.chunk is None and got.broken is not None and got.broken.kind == "unreadable"

        def refuses(self: LocalFolder, name: str) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(LocalFolder, "load", refuses)
        with pytest.raises(StoreError, match="Permission denied"), warnings.catch_warnings():
            store.load(FULL.key)


def test_a_url_is_loaded_as_it_is_read(tmp_path: Path) -> None:
    with ChunkStore(f"memory://{tmp_path.name}") as store:
        store.put(FULL)
        assert same(store.load(FULL.key).chunk, FULL)
