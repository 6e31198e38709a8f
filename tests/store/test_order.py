"""In which order a store writes, syncs and renames: what a power failure between two of these may leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longreach.store import ChunkStore
from tests.store.factory import chunk, path

Calls = list[tuple[Any, ...]]


def file_of(fd: int) -> Path:
    return Path(os.readlink(f"/dev/fd/{fd}"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """(name of the call, file, ...) of each write, sync, rename and new folder. A write also notes its offset and the
    first 8 bytes that the file had before it."""
    noted: Calls = []
    write, sync, rename, mkdir = os.pwritev, os.fsync, os.rename, os.mkdir

    def pwritev(fd: int, buffers: Any, at: int) -> int:
        noted.append(("write", file_of(fd), at, os.pread(fd, 8, 0)))
        return write(fd, buffers, at)

    def fsync(fd: int) -> None:
        noted.append(("sync", file_of(fd)))
        sync(fd)

    def renamed(source: Any, target: Any) -> None:
        noted.append(("rename", Path(source), Path(target)))
        rename(source, target)

    def made(folder: Any, *rest: Any) -> None:
        mkdir(folder, *rest)
        noted.append(("mkdir", Path(folder)))

    for name, instead in (("pwritev", pwritev), ("fsync", fsync), ("rename", renamed), ("mkdir", made)):
        monkeypatch.setattr(os, name, instead)
    yield noted


def test_a_chunk_is_written_header_last_synced_and_then_renamed(tmp_path: Path, calls: Calls) -> None:
    with ChunkStore(tmp_path / "store") as store:
        calls.clear()
        store.put(chunk(1, 50))
    writes = [c for c in calls if c[0] == "write"]
    assert len(writes) >= 2 and [at for _, _, at, _ in writes[:-1]] == sorted(at for _, _, at, _ in writes[:-1])
    assert writes[0][2] > 0 and writes[-1][2] == 0, "the header lies first and comes last"
    assert all(first == bytes(8) for *_, first in writes), "until then the file is no chunk"
    temporary, target = writes[0][1], path(tmp_path / "store", chunk(1, 50))
    assert [c for c in calls if c[0] != "write"] == [
        ("sync", temporary),
        ("rename", temporary, target),
        ("sync", tmp_path / "store"),
    ]
    assert calls.index(writes[-1]) < calls.index(("sync", temporary))


@pytest.mark.parametrize("place", ["store", "a/b/store"])
def test_a_new_store_is_synced_and_so_are_the_folders_above_it(tmp_path: Path, calls: Calls, place: str) -> None:
    """Else the power may go and take the folder with all chunks that were synced into it."""
    ChunkStore(tmp_path / place).close()
    made = [c[1] for c in calls if c[0] == "mkdir"]
    assert tmp_path / place in made and tmp_path / place / "writing" in made
    for folder in made:
        assert ("sync", folder.parent) in calls[calls.index(("mkdir", folder)) :], f"{folder} may be lost"
    synced = [c for c in calls if c[0] == "sync"]
    calls.clear()
    ChunkStore(tmp_path / place).close()
    assert not calls and synced, "a store that is there needs no syncing"
