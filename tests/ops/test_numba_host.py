"""The threads that run compiled programs: shared by caches, grown on demand, made again in a forked process."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longreach.cache.host import allocate
from longreach.ops import KVView, Rows, Spans, attend
from longreach.ops.host_calls import HostCalls
from longreach.testing.inputs import random_kv, random_rows

numba_host: Any = pytest.importorskip("longreach.ops.numba_host", reason="needs Numba")
CPU = torch.device("cpu")


def case(seed: int) -> tuple[Rows, KVView, torch.Tensor]:
    kv = random_kv([3000, 50], heads=2, dim=16)
    rows = random_rows(kv, 4, group=2, seed=seed)
    want = attend(rows, kv, Spans.dense(), scale=0.2, impl="reference").out
    return rows, replace(kv, calls=HostCalls(CPU, allocate)), want


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_pool_has_an_address_and_grows() -> None:
    assert numba_host.pool(1) == numba_host.pool(0) == 0
    first = numba_host.pool(2)
    assert first and numba_host.pool(4) == first == numba_host.pool(2)
    names = [thread.name for thread in threading.enumerate() if thread.daemon]
    assert names.count("longreach-host") >= 3


def test_caches_of_several_threads_share_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread with a worker count of its own, that changes from call to call."""
    workers = threading.local()
    monkeypatch.setattr(torch, "get_num_threads", lambda: getattr(workers, "count", 2))
    cases, wrong = [case(seed) for seed in range(3)], list[object]()

    def work(number: int) -> None:
        rows, kv, want = cases[number]
        try:
            for turn in range(40):
                workers.count = 1 + (number + turn) % 4
                got = attend(rows, kv, Spans.dense(), scale=0.2).out
                if not torch.allclose(got, want, atol=1e-4):
                    wrong.append((number, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rows, kv, want = case(5)
    attend(rows, kv, Spans.dense(), scale=0.2)  # the pool exists
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that the child lacks
        child = os.fork()
    if not child:
        code = 1
        try:
            got = attend(rows, kv, Spans.dense(), scale=0.2).out
            code = 0 if bool((got - want).abs().max() < 1e-4) and len(numba_host._pools) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_that_is_noted_first_stays() -> None:
    def failing(address: int, phase: int) -> None:
        if phase != prepare:
            fail(address, wrong if phase == pieces else failed)

    fail, failed, wrong = numba_host.fail, numba_host.FAILED, numba_host.WRONG_ENTRIES
    prepare, pieces = numba_host.PREPARE, numba_host.PIECES
    assert run(failing) == wrong, "of the phase before the last one"


@pytest.mark.parametrize("workers", [1, 3])
def test_nothing_follows_a_preparation_that_fails(workers: int) -> None:
    """Of the job, or of one before it whose error was not read yet."""

    def failing(address: int, phase: int) -> None:
        if phase == prepare:
            fail(address, failed)
        else:
            array_at(array_at(address, (1,), common)[0].status, (1,), np.int64)[0] = 99

    fail, failed, prepare = numba_host.fail, numba_host.FAILED, numba_host.PREPARE
    array_at, common = numba_host.array_at, numba_host.COMMON
    assert run(failing, workers) == failed and run(failing, workers, status=numba_host.WRONG_ENTRIES) == 1


def run(program: Any, workers: int = 1, status: int = 0) -> int:
    """The status word after a job of this program."""
    job, word = np.zeros(1, numba_host.COMMON), np.full(1, status, np.int64)
    job["program"], job["status"], job["workers"] = numba_host.program(program), word.ctypes.data, workers
    job["pool"] = numba_host.pool(workers)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(numba_host.address())(job.ctypes.data)
    return int(word[0])
