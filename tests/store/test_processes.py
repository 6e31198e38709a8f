"""Several processes and threads at one store."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longreach.store import ChunkStore, local
from longreach.store.locked import held
from tests.store.factory import chunk, same, size


def together(work: list[Callable[[], Any]], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """Run each in a forked process, all released at once; their results (JSON)."""
    gate, opener = os.pipe()
    children = []
    for one in work:
        reading, telling = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(opener)
                os.read(gate, 1)
                os.write(telling, json.dumps(one()).encode())
            finally:
                os._exit(0)
        os.close(telling)
        children.append((child, reading))
    os.close(gate)
    os.close(opener)
    while any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for child, _ in children):
        meanwhile()
    results = []
    for child, reading in children:
        os.waitpid(child, 0)
        with os.fdopen(reading) as stream:
            results.append(json.loads(stream.read()))
    return results


def test_two_processes_adding_the_same_documents(tmp_path: Path) -> None:
    numbers = list(range(30))

    def adding(seed: int) -> dict[str, Any]:
        order = random.Random(seed).sample(numbers, len(numbers))
        with ChunkStore(tmp_path) as store:
            for n in order:
                if store.get(chunk(n).key) is None:
                    store.put(chunk(n))
            assert all(same(store.get(chunk(n).key), chunk(n)) for n in numbers)
            return store.report()

    reports = together([lambda: adding(1), lambda: adding(2)])
    assert sum(r["put"] for r in reports) == len(numbers)  # whoever was second threw his copy away
    assert all(r["set_aside"] == {} for r in reports)
    with ChunkStore(tmp_path, verify="always") as store:
        assert store.verify_all().whole == len(numbers) == len(store.entries())
    assert not list((tmp_path / "writing").iterdir())


def test_two_processes_adding_the_very_same_chunk(tmp_path: Path) -> None:
    ChunkStore(tmp_path).close()

    def adding(number: int) -> Callable[[], bool]:
        def add() -> bool:
            with ChunkStore(tmp_path) as store:
                return store.put(chunk(number, tokens=3000))

        return add

    for n in range(8):
        assert sum(together([adding(n), adding(n)])) == 1
    with ChunkStore(tmp_path) as store:
        assert store.verify_all().whole == 8


def test_the_cap_holds_under_load(tmp_path: Path) -> None:
    room = 5 * size(chunk(0, 400), tmp_path) + 10
    folder, seen = tmp_path / "store", []
    ChunkStore(folder).close()

    def writing(seed: int) -> dict[str, Any]:
        with ChunkStore(folder, max_bytes=room) as store:
            for n in range(25):
                store.put(chunk(100 * seed + n, 400))
                store.get(chunk(100 * seed + n // 2, 400).key)
            return store.report()

    def look() -> None:
        with held(folder / ".longreach-chunk-store"):
            files = [f for part in (folder, folder / "writing") for f in part.iterdir() if f.is_file()]
            seen.append(sum(f.stat().st_size for f in files))

    reports = together([lambda: writing(1), lambda: writing(2), lambda: writing(3)], look)
    assert len(seen) > 5 and 0.7 * room < max(seen) <= room
    assert all(r["put"] == 25 and r["set_aside"] == {} for r in reports)
    with ChunkStore(folder) as store:
        assert store.verify_all().broken == () and sum(e.bytes for e in store.entries()) <= room


def test_an_unfinished_file_may_vanish_while_it_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another writer's disk is full."""
    with ChunkStore(tmp_path, max_bytes=10**6) as store:
        store.put(chunk(0))
        file = tmp_path / "writing" / ("0" * 64 + "." + "0" * 16)
        file.touch()

        def abandoned(path: Path) -> bool:
            path.unlink()
            return False

        monkeypatch.setattr(local, "abandoned", abandoned)
        real = os.scandir
        listed = list(real(tmp_path / "writing"))
        monkeypatch.setattr(os, "scandir", lambda at: listed if Path(at).name == "writing" else list(real(at)))
        assert store.put(chunk(1)) and len(store.entries()) == 2


def test_threads_share_an_open_store(tmp_path: Path) -> None:
    wrong: list[int] = []
    with ChunkStore(tmp_path) as store:

        def work(seed: int) -> None:
            for n in random.Random(seed).sample(range(12), 12):
                store.put(chunk(n))
                if not same(store.get(chunk(n).key), chunk(n)):
                    wrong.append(n)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = store.report()
    assert not wrong and report["put"] == 12 and report["already_there"] == 60 and report["hits"] == 72
