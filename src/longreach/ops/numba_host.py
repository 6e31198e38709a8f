# mypy: ignore-errors
"""Compiled programs that the CPU runs in the order of a CUDA stream's work, without the interpreter.

A job is a record. It begins with the fields HEAD; the rest belongs to its program. CUDA calls `run` with the
address of a job. A program is a compiled function of (address of the job, phase): one thread prepares, several threads
take pieces of work from the counter, one thread finishes. Nothing follows a preparation once an error is noted.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from longreach.ops.numba_math import INLINE

PREPARE, PIECES, FINISH = 0, 1, 2
WRONG_ENTRIES, FAILED = 1, 2  # values of a status word; 0: all is well
# of a job of any program, and of a view of keys and values in a job: strides of (page, head, slot); slots in a page
HEAD = ("program", "status", "workers", "counter", "pool")
VIEW = (
    "k", "v", "k_size", "v_size", "k0", "k1", "k2", "v0", "v1", "v2", "table", "pages", "page", "sequences", "paged",
)  # fmt: skip
START, BUSY, JOB, DONE = 0, 4, 8, 9  # of a pool, int64 [10]: two semaphores of 32 bytes, a job's address, a count


def job_type(*fields):
    """The dtype of a program's job: int64 fields of these names, or "name:f8" for float64, behind those of any job."""
    named = [(name, kind or "i8") for name, _, kind in (field.partition(":") for field in (*HEAD, *fields))]
    return np.dtype(named)


COMMON = job_type()
COUNTER = COMMON.fields["counter"][1]
_wait = types.ExternalFunction("sem_wait", types.intc(types.intp))
_post = types.ExternalFunction("sem_post", types.intc(types.intp))
_yield = types.ExternalFunction("sched_yield", types.intc())


@intrinsic
def _pointer(context, address):
    """The address as a pointer."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _call(context, function, job, phase):
    """Call the function at an address with (job, phase)."""

    def generate(context, builder, signature, args):
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word, word])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _add(context, address, amount):
    """Add to the int64 at an address, atomically; its value before."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@njit(**INLINE)
def array_at(address, shape, dtype):
    """The array of this shape (a tuple) and dtype at an address."""
    return carray(_pointer(address), shape, dtype)


@njit(**INLINE)
def counter_of(address):
    """The counter of a job, from which threads take pieces: int64 [1]."""
    return carray(_pointer(address + COUNTER), (1,), np.int64)


@njit(**INLINE)
def fail(address, code):
    """Note an error. The first one stays."""
    status = array_at(array_at(address, (1,), COMMON)[0].status, (1,), np.int64)
    if status[0] == 0:
        status[0] = code


@njit(**INLINE)
def _until_posted(semaphore):
    while _wait(semaphore) != 0:  # a signal came
        pass


@njit(**INLINE)
def _run(address):
    job = array_at(address, (1,), COMMON)[0]
    program, workers, pool = job.program, job.workers, job.pool
    counter_of(address)[0] = 0
    _call(program, address, PREPARE)
    if array_at(job.status, (1,), np.int64)[0] != 0:
        return  # pieces would read places that were not prepared
    if workers > 1:
        _until_posted(pool + 8 * BUSY)  # one job at a time
        fields = array_at(pool, (DONE + 1,), np.int64)
        fields[JOB] = address
        fields[DONE] = 0
        for _ in range(workers - 1):
            _post(pool + 8 * START)
        _call(program, address, PIECES)
        while _add(pool + 8 * DONE, 0) < workers - 1:
            _yield()
        _post(pool + 8 * BUSY)
    else:
        _call(program, address, PIECES)
    _call(program, address, FINISH)


@cfunc(types.void(types.voidptr), cache=True)
def _callback(job):
    _run(carray(job, (1,), np.int64).ctypes.data)


@njit("void(int64)", nogil=True, cache=True)
def _serve(pool):
    """A thread of the pool: works on a job whenever one is posted, and never returns."""
    while True:
        _until_posted(pool + 8 * START)
        address = array_at(pool, (DONE + 1,), np.int64)[JOB]
        _call(array_at(address, (1,), COMMON)[0].program, address, PIECES)
        _add(pool + 8 * DONE, 1)


class _Pool:
    """Threads that run pieces of jobs. They hold no lock of the interpreter, and end with the process."""

    def __init__(self) -> None:
        self.fields, self._threads = np.zeros(DONE + 1, np.int64), 0
        libc = ctypes.CDLL(None, use_errno=True)
        for place, value in ((START, 0), (BUSY, 1)):
            if libc.sem_init(ctypes.c_void_p(self.fields.ctypes.data + 8 * place), 0, value):
                raise OSError(ctypes.get_errno(), "sem_init failed")

    def grow(self, threads: int) -> int:
        """The pool's address, once it has so many threads."""
        while self._threads < threads:
            threading.Thread(target=_serve, args=(self.fields.ctypes.data,), name="longreach-host", daemon=True).start()
            self._threads += 1
        return self.fields.ctypes.data


_lock = threading.Lock()
_pools: list[_Pool] = []  # at most one
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # threads are not inherited


def pool(workers: int) -> int:
    """The address of a pool that runs pieces in so many threads, the caller's included; 0 if that is all."""
    if workers <= 1:
        return 0
    with _lock:
        if not _pools:
            _pools.append(_Pool())
        return _pools[0].grow(workers - 1)


def address() -> int:
    """The address of the function that runs a job, given the job's address: what CUDA calls."""
    return _callback.address


def program(run: Callable[..., None]) -> int:
    """The address of a program, compiled from a function of (address of the job, phase)."""
    return _compiled(run).address


@cache
def _compiled(run: Callable[..., None]):
    return cfunc(types.void(types.int64, types.int64), cache=True)(run)
