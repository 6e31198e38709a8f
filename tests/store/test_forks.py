"""A child forked in the middle of something keeps no lock of its parent's, takes none from it, can use the store."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from longreach.store import ChunkStore, writing
from longreach.store.local import LOCK
from tests.store.factory import chunk, die, in_child, same

SECONDS = 20  # more than any put here takes, and less than the children live


@contextmanager
def idle_child() -> Iterator[None]:
    """A forked process that does nothing for as long as the block takes; it runs when the block begins."""
    reading, telling = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(telling, b"x")
        time.sleep(10 * SECONDS)
        os._exit(0)
    try:
        os.read(reading, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(telling)


def in_time(work: Callable[[], Any]) -> Any:
    """What it returns; fails where it takes too long."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "it waits for a lock, or failed"
    return found[0]


@contextmanager
def a_put_that_stops(store: ChunkStore, monkeypatch: pytest.MonkeyPatch, step: str) -> Iterator[threading.Event]:
    """Another thread puts chunk 1 and stops at a step of it until the event is set, or the block ends."""
    there, go, real = threading.Event(), threading.Event(), getattr(writing, step)

    def slow(*args: Any) -> None:
        there.set()
        assert go.wait(10 * SECONDS)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writing, step, slow)
        thread = threading.Thread(target=store.put, args=(chunk(1),))
        thread.start()
        assert there.wait(SECONDS)
    try:
        yield go
    finally:
        go.set()
        thread.join()


def test_a_child_forked_under_the_lock_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ChunkStore(tmp_path) as store,
        a_put_that_stops(store, monkeypatch, "reserve") as go,  # the store's lock is held there
        idle_child(),
    ):
        go.set()
        assert in_time(lambda: store.put(chunk(2)))
        assert in_child(lambda: ChunkStore(tmp_path).put(chunk(3)) or die()) == 0
    with ChunkStore(tmp_path) as store:
        assert store.verify_all().whole == 3


def test_a_child_does_not_take_the_lock_from_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ChunkStore(tmp_path) as store,
        a_put_that_stops(store, monkeypatch, "reserve"),
        idle_child(),
        (tmp_path / LOCK).open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("step", ["reserve", "fill"])
def test_a_writer_killed_leaves_no_lock_with_its_child(tmp_path: Path, step: str) -> None:
    """Neither the store's, nor that of its unfinished file, which would then stay as long as the child lives."""
    reading, telling = os.pipe()
    ChunkStore(tmp_path).close()

    def forking(*_: Any) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(10 * SECONDS)
            os._exit(0)
        os.write(telling, child.to_bytes(8, "little"))
        die()

    def writer() -> None:
        setattr(writing, step, forking)
        ChunkStore(tmp_path).put(chunk(1))

    assert in_child(writer) == -signal.SIGKILL
    grandchild = int.from_bytes(os.read(reading, 8), "little")
    try:
        with ChunkStore(tmp_path) as store:
            assert in_time(lambda: store.put(chunk(2))) and store.report()["leftovers_removed"] == 1
        assert not list((tmp_path / "writing").iterdir())
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reading)
        os.close(telling)


def test_an_unfinished_file_stays_its_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim is not let go by a child that closes its copy."""
    with ChunkStore(tmp_path) as store:
        with a_put_that_stops(store, monkeypatch, "fill"), idle_child():
            assert store.gc().leftovers == 0 and len(list((tmp_path / "writing").iterdir())) == 1
        assert same(store.get(chunk(1).key), chunk(1))


def test_a_child_uses_the_open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore(tmp_path) as store:
        store.put(chunk(0))

        def child() -> None:
            signal.alarm(SECONDS)
            assert same(store.get(chunk(0).key), chunk(0))
            assert store.put(chunk(2)) and same(store.get(chunk(2).key), chunk(2))

        with a_put_that_stops(store, monkeypatch, "fill"):
            assert in_child(child) == 0
        assert store.verify_all().whole == 3


def test_no_child_is_forked_in_the_middle_of_a_count(tmp_path: Path) -> None:
    there = threading.Event()

    class Slow(Counter[str]):
        def __setitem__(self, name: str, count: int) -> None:
            there.set()
            time.sleep(0.3)
            super().__setitem__(name, count)

    with ChunkStore(tmp_path) as store:
        store._counts._counts = Slow()
        thread = threading.Thread(target=store.get, args=(chunk(0).key,))
        thread.start()
        assert there.wait(SECONDS)

        def child() -> None:
            signal.alarm(SECONDS)
            assert store.report()["misses"] == 1

        assert in_child(child) == 0
        thread.join()
