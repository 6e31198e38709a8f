"""Killed anywhere, a writer leaves every chunk whole or absent, and nothing that stays for ever.

There is no index to update: the step after the rename is the syncing of the folder, and at a read the last use is kept.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longreach.store import ChunkStore, writing
from longreach.store.locked import abandoned, held
from tests.store.factory import chunk, die, in_child, path, same, size

CALLS = ("open", "posix_fallocate", "pwritev", "utime", "fsync", "rename", "unlink", "mkdir", "close")
KILLED = -signal.SIGKILL
ROOM = 6  # chunks that the store under two writers holds
NUMBERS = range(14)
LONG = 2000  # tokens, so that kills hit the writing


def whole_or_absent(folder: Path, numbers: range, tokens: int = 4) -> list[int]:
    """Numbers of the chunks that are there, all of which must be whole; what was left unfinished must be gone."""
    with ChunkStore(folder, verify="always") as store, warnings.catch_warnings():
        warnings.simplefilter("error")  # a broken file would be warned of
        there = [n for n in numbers if (got := store.get(chunk(n, tokens).key)) and same(got, chunk(n, tokens))]
        assert len(store.entries()) == len(there) and store.verify_all().whole == len(there)
        store.gc()
    assert not list((folder / "writing").iterdir())
    return there


def dying_before(call: int) -> None:
    """Make this process die before its n-th system call of CALLS, in the middle of it where it writes."""
    left = iter(range(call, -1, -1))

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            if next(left) == 0:
                if name == "pwritev":
                    fd, buffers, at = args
                    real(fd, [b[: b.nbytes // 2] for b in buffers[:2]], at)
                die()
            return real(*args, **named)

        return called

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def put_new(store: ChunkStore) -> None:
    store.put(chunk(9))


def get_used(store: ChunkStore) -> None:
    store.get(chunk(2).key)


def clear(store: ChunkStore) -> None:
    store.gc(1)


@pytest.mark.parametrize("work", [put_new, get_used, clear])
def test_killed_at_each_system_call(tmp_path: Path, work: Callable[[ChunkStore], None]) -> None:
    room = 3 * size(chunk(0), tmp_path)
    folder, calls = tmp_path / "store", 0
    while True:
        with ChunkStore(folder, max_bytes=room) as store:
            store.remove(chunk(9).key)
            for n in range(3):
                store.put(chunk(n))

            def child(store: ChunkStore = store, call: int = calls) -> None:
                dying_before(call)
                work(store)

            status = in_child(child)
        there = whole_or_absent(folder, range(10))
        if status == 0:
            break
        assert status == KILLED
        calls += 1
        if work is get_used:
            assert there == [0, 1, 2]
        elif work is put_new:
            assert set(there) >= {1, 2}  # 0 may have given way
    assert calls >= {put_new: 12, get_used: 2, clear: 4}[work]


def half(fd: int, buffers: list[memoryview], at: int, real: Any = os.pwritev) -> None:
    real(fd, [memoryview(b"".join(buffers))[: sum(b.nbytes for b in buffers) // 2]], at)
    die()


STEPS: dict[str, tuple[object, str, Callable[..., Any], bool]] = {  # where, what is replaced by what, chunk there after
    "temporary file created": (writing, "reserve", lambda *_: die(), False),
    "half written": (os, "pwritev", half, False),
    "before fsync": (os, "fsync", lambda *_: die(), False),
    "before rename": (os, "rename", lambda *_: die(), False),
    "before the folder is synced": (writing, "sync_folder", lambda *_: die(), True),
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step_of_a_write(tmp_path: Path, step: str) -> None:
    where, name, instead, there = STEPS[step]
    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))

        def child() -> None:
            setattr(where, name, instead)
            store.put(chunk(1))

        assert in_child(child) == KILLED
    left = len(list((tmp_path / "writing").iterdir()))
    assert left == (0 if there else 1)
    with ChunkStore(tmp_path, verify="always") as store:
        assert store.put(chunk(2)) and store.report()["leftovers_removed"] == left  # the next write clears up
        assert (chunk(1).key in store) == there == same(store.get(chunk(1).key), chunk(1))
        assert store.put(chunk(1)) != there
    assert whole_or_absent(tmp_path, range(3)) == [0, 1, 2]


def test_killed_before_the_last_use_is_kept(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for n in range(2):
            store.put(chunk(n))
        before = store.entries()

        def child() -> None:
            os.utime = lambda *_, **__: die()  # type: ignore[assignment]
            store.get(chunk(0).key)

        assert in_child(child) == KILLED
        assert {e.name for e in store.entries()} == {e.name for e in before}  # the use may be lost, nothing else
    assert whole_or_absent(tmp_path, range(2)) == [0, 1]


def test_killed_while_a_broken_file_is_set_aside(tmp_path: Path) -> None:
    for call in range(40):
        with ChunkStore(tmp_path) as store:
            store.put(chunk(0))
            os.truncate(path(tmp_path, chunk(0)), 60)

            def child(store: ChunkStore = store, call: int = call) -> None:
                warnings.simplefilter("ignore")
                dying_before(call)
                assert store.get(chunk(0).key) is None

            status = in_child(child)
        with ChunkStore(tmp_path) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert store.get(chunk(0).key) is None and store.put(chunk(0))
        if status == 0:
            break
    assert status == 0 and call >= 3


def test_another_process_does_not_take_a_live_write_for_a_dead_one(tmp_path: Path) -> None:
    reading, telling = os.pipe()
    with ChunkStore(tmp_path) as store:

        def child() -> None:
            real = os.fsync

            def slow(fd: int) -> None:
                os.write(telling, b"x")
                time.sleep(0.3)
                real(fd)

            os.fsync = slow
            store.put(chunk(1))

        worker = os.fork()
        if worker == 0:
            child()
            os._exit(0)
        os.read(reading, 1)
        assert store.put(chunk(2)) and store.gc().leftovers == 0
        assert len(list((tmp_path / "writing").iterdir())) == 1
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
        assert same(store.get(chunk(1).key), chunk(1))
    for fd in (reading, telling):
        os.close(fd)


def test_a_hundred_kills_under_two_writers(tmp_path: Path) -> None:
    room = ROOM * size(chunk(0, LONG), tmp_path)
    folder, draw = tmp_path / "store", random.Random(0)
    ready = [chunk(n, LONG) for n in NUMBERS]

    def work(seed: int) -> None:
        mine = random.Random(seed)
        warnings.simplefilter("error")
        with ChunkStore(folder, max_bytes=room) as store:
            while True:
                one = mine.choice(ready)
                got = store.get(one.key)
                assert got is None or same(got, one)
                store.put(one)

    def writer(seed: int) -> int:
        child = os.fork()
        if child == 0:
            try:
                work(seed)
            finally:
                os._exit(1)
        return child

    ChunkStore(folder).close()
    writers = [writer(n) for n in range(2)]
    kills, put, torn = 100, 0, 0
    for kill in range(kills):
        time.sleep(draw.random() * 0.04)
        victim = draw.randrange(2)
        assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a writer failed"
        os.kill(writers[victim], signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writers[victim], 0)[1]) == KILLED
        with held(folder / ".longreach-chunk-store"):
            torn += any(abandoned(file) for file in (folder / "writing").iterdir())
        writers[victim] = writer(1000 + kill)
        if kill % 10 == 9:
            with held(folder / ".longreach-chunk-store"):
                files = [f for part in (folder, folder / "writing") for f in part.iterdir() if f.is_file()]
                assert sum(f.stat().st_size for f in files) <= room
            put = max(put, len(list(folder.glob("*.safetensors"))))
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    there = whole_or_absent(folder, NUMBERS, LONG)
    assert 1 <= len(there) <= ROOM and put >= ROOM - 2  # the writers did write,
    assert torn >= 5  # and were killed at it
    assert not list((folder / "set-aside").iterdir())
