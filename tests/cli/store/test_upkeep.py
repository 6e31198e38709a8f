"""`longreach store list`, `verify` and `gc` on stores that are whole, damaged, capped or not there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from longreach.store import ChunkStore
from longreach.store.local import LocalFolder
from tests.cli.store.test_add import TEXT, added
from tests.cli.test_bad_input import refused
from tests.store.factory import chunk


@pytest.fixture
def store(longreach: Any, tiny: Path, tmp_path: Path) -> Path:
    """Chunks of a text alone, and behind the start token."""
    (tmp_path / "book.txt").write_text(TEXT)
    for more in ((), ("--prefix", "")):
        added(longreach, tiny, tmp_path / "store", tmp_path / "book.txt", *more)
    return tmp_path / "store"


def test_list(longreach: Any, store: Path) -> None:
    files = {f.stem: f.stat().st_size for f in store.glob("*.safetensors")}
    said = json.loads(longreach("store", "list", "--store", store, "--json").out)
    assert {c["name"]: c["bytes"] for c in said["chunks"]} == files and said["bytes"] == sum(files.values())
    assert said["unreadable"] == [] and {c["prefix_tokens"] for c in said["chunks"]} == {0, 1}
    assert {(c["dtype"], c["layers"]) for c in said["chunks"]} == {("float32", 2)}
    assert all(0 < c["tokens"] <= 64 for c in said["chunks"])
    groups = longreach("store", "list", "--store", store).out.splitlines()
    assert len(groups) == 3 + 2 and groups[0].split()[:3] == ["model", "dtype", "prefix"]
    assert [line.split()[2] for line in groups[1:3]] == ["0", "1"] and f"{len(files)} chunks" in groups[-1]
    rows = longreach("store", "list", "--store", store, "--all").out.splitlines()[1 : 1 + len(files)]
    assert {row.split()[0] for row in rows} == {name[:12] for name in files}


def test_verify(longreach: Any, store: Path) -> None:
    count = len(list(store.glob("*.safetensors")))
    good = longreach("store", "verify", "--store", store)
    assert good.code == 0 and good.err == "" and f"{count} chunks are whole, 0 files" in good.out
    flipped, cut = sorted(store.glob("*.safetensors"))[:2]
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
    cut.write_bytes(cut.read_bytes()[:100])
    (store / "stray.txt").write_text("x")
    listed = longreach("store", "list", "--store", store)
    assert listed.code == 0 and "1 files have no header of a chunk" in listed.out
    found = longreach("store", "verify", "--store", store, "--json")
    said = json.loads(found.out)
    assert found.code == 1 and found.err == "" and said["whole"] == count - 2
    assert {b["file"] for b in said["broken"]} == {flipped.name, cut.name, "stray.txt"}
    assert not flipped.exists() and not cut.exists()
    again = longreach("store", "verify", "--store", store)
    assert again.code == 0 and f"{count - 2} chunks are whole" in again.out


def test_verify_names_each_fault(longreach: Any, store: Path) -> None:
    (store / "stray.txt").write_text("x")
    result = longreach("store", "verify", "--store", store)
    assert result.code == 1 and result.out.splitlines()[0].startswith("stray.txt: foreign: ")
    assert result.out.splitlines()[0].endswith("; set aside") and "1 files were not (1 of them set aside" in result.out


def test_verify_says_what_it_could_not_set_aside(longreach: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(LocalFolder, "set_aside", refuse)
    (store / "stray.txt").write_text("x")
    said = json.loads(longreach("store", "verify", "--store", store, "--json").out)
    assert [(b["file"], b["moved"]) for b in said["broken"]] == [("stray.txt", False)]
    assert said["broken"][0]["became"] == "left in place (Permission denied)"
    told = longreach("store", "verify", "--store", store)
    assert told.code == 1 and "left in place (Permission denied)" in told.out
    assert "1 files were not (0 of them set aside" in told.out


def test_a_file_that_cannot_be_read_stops_neither_list_nor_verify(
    longreach: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = sorted(store.glob("*.safetensors"))[1]
    count, real = len(list(store.glob("*.safetensors"))), os.open

    def refusing(at: Any, *args: Any, **named: Any) -> int:
        if Path(at) == bad:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(at, *args, **named)

    monkeypatch.setattr(os, "open", refusing)
    listed = json.loads(longreach("store", "list", "--store", store, "--json").out)
    assert len(listed["chunks"]) == count - 1
    assert [one["name"] for one in listed["unreadable"]] == [bad.stem]
    assert "Permission denied" in listed["unreadable"][0]["why"]
    told = longreach("store", "list", "--store", store)
    assert told.code == 0 and f"{bad.stem[:12]}: unreadable: " in told.out and "Permission denied" in told.out
    found = longreach("store", "verify", "--store", store, "--json")
    said = json.loads(found.out)
    assert found.code == 1 and said["whole"] == count - 1
    assert [(b["file"], b["kind"], b["moved"]) for b in said["broken"]] == [(bad.name, "unreadable", False)]
    text = longreach("store", "verify", "--store", store)
    assert text.code == 1 and text.out.startswith(f"{bad.name}: unreadable: Permission denied; left in place")


def test_gc_empties_what_was_set_aside(longreach: Any, store: Path) -> None:
    first = sorted(store.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-8])
    (store / "stray.txt").write_text("x")
    longreach("store", "verify", "--store", store)
    kept = json.loads(longreach("store", "gc", "--store", store, "--json").out)
    assert kept["broken_removed"] == 0 and len(list((store / "set-aside").iterdir())) == 2
    result = longreach("store", "gc", "--store", store, "--set-aside")
    assert result.code == 0 and "1 broken ones set aside" in result.out
    assert [p.name[21:] for p in (store / "set-aside").iterdir()] == ["foreign-stray.txt"]


@pytest.mark.parametrize("action", ["list", "verify", "gc"])
def test_a_url_that_is_no_store_is_left_as_it_is(longreach: Any, action: str) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/somebodys/letters.txt", b"x")
    for url in ("memory://somebodys", "memory://nobodys"):
        refused(longreach("store", action, "--store", url), "no chunk store at", "store add")  # type: ignore[arg-type]
    assert fs.find("/somebodys") == ["/somebodys/letters.txt"] and not fs.exists("/nobodys")


def test_verify_and_gc_tell_what_they_leave_alone(longreach: Any, store: Path) -> None:
    (store / "mine").mkdir()
    (store / "writing" / "a folder").mkdir()
    for action in ("verify", "gc"):
        said = json.loads(longreach("store", action, "--store", store, "--json").out)
        assert [one["file"] for one in said["left_alone"]] == ["mine", "writing/a folder"]
        told = longreach("store", action, "--store", store)
        assert told.code == 0 and told.out.startswith("mine: left alone: a folder that is not the store's")


def test_gc(longreach: Any, store: Path) -> None:
    before = sum(f.stat().st_size for f in store.glob("*.safetensors"))
    (store / "writing" / f"{'0' * 64}.{'0' * 16}").write_bytes(b"half a chunk")
    result = longreach("store", "gc", "--store", store)
    assert result.code == 0 and "0 chunks removed (0 B), and 1 unfinished" in result.out
    said = json.loads(longreach("store", "gc", "--store", store, "--max-bytes", before // 2, "--json").out)
    assert said["bytes"] <= before // 2 and said["removed_bytes"] + said["bytes"] == before
    assert said["removed"] > 0 and said["chunks"] == len(list(store.glob("*.safetensors")))
    with ChunkStore(store) as opened:
        assert len(opened.entries()) == said["chunks"]


@pytest.mark.parametrize("action", ["list", "verify", "gc"])
def test_where_there_is_no_store(longreach: Any, tmp_path: Path, action: str) -> None:
    """None is made."""
    refused(longreach("store", action, "--store", tmp_path / "none"), "no chunk store at", "store add")
    refused(longreach("store", action, "--store", f"file://{tmp_path}/none"), "no chunk store at", "store add")
    assert not (tmp_path / "none").exists()
    refused(longreach("store", action, "--store", tmp_path), "no chunk store at")
    assert list(tmp_path.iterdir()) == []
    result = longreach("store", action)
    assert result.code == 2 and "--store" in result.err


def test_an_action_is_needed(longreach: Any) -> None:
    for arguments, word in (((), "ACTION"), (("frobnicate",), "frobnicate")):
        result = longreach("store", *arguments)
        assert result.code == 2 and word in result.err and result.out == ""


@pytest.mark.parametrize("more", [(), *(pytest.param(x, marks=pytest.mark.sweep) for x in (("--all",), ("--json",)))])
def test_a_reader_that_has_left_is_no_error(tmp_path: Path, more: tuple[str, ...]) -> None:
    """As in `longreach store list | true`."""
    with ChunkStore(tmp_path) as one:
        one.put(chunk(0))
    reading, telling = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "longreach", "store", "list", "--store", str(tmp_path), *more]
    done = subprocess.run(command, stdout=telling, stderr=subprocess.PIPE, text=True)
    os.close(telling)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_home_of_nobody_is_refused(longreach: Any) -> None:
    refused(longreach("store", "list", "--store", "~nosuchuser/chunks"), "~nosuchuser/chunks", "write it out")


def test_a_chunk_that_may_not_be_removed_is_told_by_gc(
    longreach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore(tmp_path) as one:
        for n in range(3):
            one.put(chunk(n))
        size = one.entries()[0].bytes
    stuck, real = f"{chunk(0).key.name}.safetensors", Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name == stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    said = longreach("store", "gc", "--store", tmp_path, "--max-bytes", str(size))
    assert said.code == 0 and f"{stuck}: left alone: may not be removed" in said.out and "2 chunks removed" in said.out
