"""The same steps in a second process, whose Numba compiles for another CPU."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longreach.bench.cpu.conditions import cold
from longreach.bench.cpu.inputs import Preset, Problem, Shape
from longreach.bench.cpu.step import Step
from longreach.errors import MeasurementFailed

AVX2 = "haswell"  # the first CPUs with AVX2, as LLVM names them
WAIT = 600.0  # seconds until the other process is given up


class Other:
    """Steps of presets, run by the other process one call at a time."""

    def __init__(self, pipe: Connection, process: Any):
        self._pipe, self._process = pipe, process

    def run(self, number: int, threads: int) -> tuple[float, Tensor]:
        """Seconds of preset `number`'s step, and its output [H, D]."""
        self._pipe.send((number, threads))
        seconds, out = self._answer()
        return seconds, torch.from_numpy(out)

    def _answer(self) -> Any:
        if not self._pipe.poll(WAIT):
            raise MeasurementFailed(f"the process for {AVX2} gave no answer within {WAIT:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise MeasurementFailed(
                f"the process for {AVX2} ended with exit code {self._process.exitcode}; its error is above"
            ) from None


@contextmanager
def other_cpu(shape: Shape, seed: int, presets: Sequence[Preset], overwritten: int, cpu: str = AVX2) -> Iterator[Other]:
    """A process that holds the same problem and tables; Numba compiles for `cpu` there, into a cache of its own.

    overwritten: bytes that it writes over the caches before each call. It does so itself: a process that only waits
    before its call would start it under other conditions.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as cache:
        changed = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": cache}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            process = multiprocessing.get_context("spawn").Process(
                target=_serve, args=(theirs, shape, seed, tuple(presets), overwritten), daemon=True
            )
            process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        theirs.close()
        other = Other(ours, process)
        try:
            other._answer()
            yield other
        finally:
            ours.close()
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join()


def _serve(pipe: Connection, shape: Shape, seed: int, presets: tuple[Preset, ...], overwritten: int) -> None:
    """Make the problem, say so, and run what is asked until the pipe closes."""
    problem = Problem(shape, seed)
    made = {key: problem.tables(*key, "numba") for key in {(p.bits, p.tables) for p in presets}}
    steps = [Step(problem, preset, made[preset.bits, preset.tables]) for preset in presets]
    for step in steps:
        step.run()
    flush = np.empty(overwritten, np.uint8)
    pipe.send(None)
    while True:
        try:
            number, threads = pipe.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        with cold(flush):
            result = steps[number].run()
        pipe.send((result.seconds, result.whole.out[0].numpy()))
