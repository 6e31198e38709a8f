# mypy: ignore-errors
"""Shared by the Numba kernels of all ops: loads of half-precision numbers, prefetching, exp, and threads.

Half precision arrives as 16-bit integers: bfloat16 as uint16, float16 as int16.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# sums may be reordered, or they would not be vectorised; NaN and infinities keep their meaning
FAST = {"reassoc", "contract", "arcp", "nsz"}
KERNEL = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False, "fastmath": FAST}
INLINE = {"cache": True, "error_model": "numpy", "boundscheck": False, "forceinline": True}


def in_turns(workers: int, kernel: Callable[..., None], *args: Any) -> None:
    """`in_threads` for kernels that `take` their work items from a counter: kernel(worker, workers, counter, *args).

    Slower threads take fewer items. The call returns once no thread runs a kernel; threads that have not started by
    then are cancelled.
    """
    in_threads(workers, kernel, np.zeros(1, np.int64), *args, all_needed=False)


def in_threads(workers: int, kernel: Callable[..., None], *args: Any, all_needed: bool = True) -> None:
    """Run kernel(worker, workers, *args) for every worker, each in its own thread; the caller's thread runs worker 0.

    all_needed: whether all workers must run. False if worker 0 alone can finish the work.
    Errors of kernels and KeyboardInterrupt are raised after all kernels have ended, as these write to the caller's
    memory.
    """
    if workers == 1:
        return kernel(0, 1, *args)
    crew = _Crew()
    try:
        for worker in range(1, workers):
            _threads.submit(crew.run, kernel, worker, workers, *args)
        kernel(0, workers, *args)
        if all_needed:
            for _ in range(1, workers):
                crew.ended.get()
        else:
            crew.wait()
    finally:
        try:
            crew.stop()
        finally:  # an interrupt may come before `stop` guards against it
            crew.stop()
    if crew.errors:
        raise crew.errors[0]


class _Crew:
    """The threads of one call. ended: an entry for each finished worker. errors: exceptions that kernels raised.

    It uses no Python locks: an interrupt right after a lock is acquired would leave it locked.
    """

    def __init__(self) -> None:
        self.ended, self.errors = SimpleQueue[int](), list[BaseException]()
        self._inside, self._stopped = list[int](), False

    def run(self, kernel: Callable[..., None], worker: int, *args: Any) -> None:
        self._inside.append(worker)
        try:
            if not self._stopped:
                kernel(worker, *args)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._inside.remove(worker)
            self.ended.put(worker)

    def wait(self) -> None:
        """Let no further kernel start, and return when none runs."""
        self._stopped = True
        while self._inside:  # each running worker puts an entry when it ends
            self.ended.get()

    def stop(self) -> None:
        """As `wait`, also during a KeyboardInterrupt, which is raised once no kernel runs."""
        interrupt = None
        self._stopped = True
        while self._inside:
            try:
                time.sleep(1e-4)  # kernels take milliseconds
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class _Threads:
    """A pool with one thread for each processor. (Numba's own pool serves one caller at a time.)

    The threads are daemons, which Python does not join at exit. The standard library's executor joins its threads: if
    it is interrupted while it starts one, the process never ends.
    """

    def __init__(self) -> None:
        self._tasks, self._started, self._most = SimpleQueue[Any](), 0, os.cpu_count() or 1

    def submit(self, run: Callable[..., Any], *args: Any) -> None:
        """Run `run(*args)` in one of the threads; it must not raise."""
        while self._started < self._most:
            threading.Thread(target=self._serve, name="longreach-cpu", daemon=True).start()
            self._started += 1  # after it has started: an interrupt between the two leaves one too many, not too few
        self._tasks.put((run, args))

    def _serve(self) -> None:
        while True:
            run, args = self._tasks.get()
            run(*args)
            del run, args  # or the last call's arrays live until the next one


_threads = _Threads()


def _forget() -> None:
    """Make a new pool in a forked process, which does not inherit threads."""
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def flat(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory, first element to last, as a flat array; an index is at place sum(index * stride)."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    whole = x.detach().as_strided((size,), (1,))
    if x.dtype == torch.bfloat16:
        return whole.view(torch.int16).numpy().view(np.uint16)
    return whole.view(torch.int16).numpy() if x.dtype == torch.float16 else whole.numpy()


@intrinsic
def to_float(context, x):
    """float32 of a bfloat16 (uint16), a float16 (int16) or a float32."""
    if x == types.float32:
        return types.float32(x), lambda context, builder, signature, args: args[0]
    if x not in (types.uint16, types.int16):
        return None
    wide = ir.IntType(32)

    def bfloat16(context, builder, signature, args):
        return builder.bitcast(builder.shl(builder.zext(args[0], wide), ir.Constant(wide, 16)), ir.FloatType())

    def float16(context, builder, signature, args):
        """Convert without special instructions, which some CPUs lack: shift the bits, then rescale by a product."""

        def number(value):
            return ir.Constant(wide, value)

        bits = builder.zext(args[0], wide)
        size = builder.shl(builder.and_(bits, number(0x7FFF)), number(13))
        right = builder.fmul(builder.bitcast(size, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**112))
        special = builder.icmp_unsigned("==", builder.and_(bits, number(0x7C00)), number(0x7C00))  # inf, NaN
        right = builder.select(special, builder.or_(size, number(0x7F800000)), builder.bitcast(right, wide))
        sign = builder.shl(builder.and_(bits, number(0x8000)), number(16))
        return builder.bitcast(builder.or_(right, sign), ir.FloatType())

    return types.float32(x), bfloat16 if x == types.uint16 else float16


@intrinsic
def prefetch(context, array, place):
    """Prefetch the cache line of array[place]."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, *(ir.Constant(number, n) for n in (0, 3, 1))])  # to read, near, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def take(context, counter):
    """The next work item: counter[0], which is incremented atomically."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def float_of(context, bits):
    """The float32 with these bits (int32)."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of(context, x):
    """The bits of a float32, as int32."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(**INLINE, fastmath={"contract"})
def exp(x):
    """exp of x <= 88 in float32, to two units in the last place; 0 below -87."""
    near = np.float32(-87.0) if x < np.float32(-87.0) else x  # NaN stays NaN
    n = np.float32(math.floor(near * np.float32(1.44269504) + np.float32(0.5)))
    f = near - n * np.float32(0.693359375)  # ln 2 in two parts
    f = f - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1.0)
    y = p * float_of((np.int32(n) + np.int32(127)) << np.int32(23))
    return np.float32(0.0) if x < np.float32(-87.0) else y
