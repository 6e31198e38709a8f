"""The same conditions for each timed call: cold caches, and threads on CPUs of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

TASKS = Path("/proc/self/task")  # this process's threads, on Linux


@contextmanager
def cold(overwritten: np.ndarray) -> Iterator[None]:
    """A block with threads `apart`, before which `overwritten` [bytes] uint8 is written over the caches.

    The calling thread is then busy until the block starts, in whichever process it runs.
    """
    with apart():
        overwritten.fill(1)
        yield


@contextmanager
def apart() -> Iterator[None]:
    """Within the block the calling thread runs on one CPU and the process's other threads on the others.

    Else Linux may wake a thread on its caller's CPU while another CPU is idle, and two threads take as long as one.
    Affinities are restored afterwards. Without effect where `places_threads` is False.
    """
    if not places_threads():
        yield
        return
    allowed, caller = os.sched_getaffinity(0), threading.get_native_id()
    one = {min(allowed)}
    before = {task: mask for task in _tasks() if (mask := _affinity(task))}
    try:
        for task in before:
            _place(task, one if task == caller else allowed - one)
        yield
    finally:
        for task in _tasks():
            _place(task, before.get(task, allowed))  # a thread that started in the block has its parent's affinity


def places_threads() -> bool:
    """Whether `apart` has an effect: on Linux, if the process may use two CPUs."""
    return TASKS.is_dir() and len(os.sched_getaffinity(0)) > 1


def _tasks() -> list[int]:
    return [int(path.name) for path in TASKS.iterdir()]


def _affinity(task: int) -> set[int]:
    with suppress(ProcessLookupError):  # it has ended
        return os.sched_getaffinity(task)
    return set()


def _place(task: int, cpus: set[int]) -> None:
    with suppress(ProcessLookupError):
        os.sched_setaffinity(task, cpus)


def flush_bytes(most: int = 1 << 30) -> int:
    """Bytes to overwrite before each call: twice the largest cache, where the system names it."""
    sizes = [64 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << (10 if text.endswith("K") else 20 if text.endswith("M") else 0))
    return min(most, 2 * max(sizes))
