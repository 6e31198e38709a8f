"""Prompts made ahead of the model by worker processes: a GPU answers in the time that a CPU takes to make the next."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import overload

from longreach.errors import LongreachError
from longreach.evals.prompting import Maker, PromptSample

_maker: Maker  # of this process, if it is a worker


class Awaited(Sequence[PromptSample]):
    """The prompts of a task, some of them still being made: who reads one waits for it, and gets its error if any."""

    def __init__(self, coming: list[Future[PromptSample]]):
        self._coming = coming

    def __len__(self) -> int:
        return len(self._coming)

    @overload
    def __getitem__(self, place: int) -> PromptSample: ...
    @overload
    def __getitem__(self, place: slice) -> list[PromptSample]: ...
    def __getitem__(self, place: int | slice) -> PromptSample | list[PromptSample]:
        if isinstance(place, slice):
            return [_result(one) for one in self._coming[place]]
        return _result(self._coming[place])


class Workers:
    """Processes that make the prompts of a Maker's tasks, the first of each task first, then in order of tasks.

    totals: prompts of each task. Raises LongreachError where tasks or tokenizer cannot be sent to a process.
    """

    def __init__(self, maker: Maker, totals: Mapping[str, int], processes: int):
        try:
            sent = pickle.dumps(maker)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LongreachError(f"the tasks cannot be sent to processes ({error}); use --workers 0") from error
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=(sent,))
        firsts = [(name, 0) for name in totals]
        order = dict.fromkeys([*firsts, *((name, n) for name, total in totals.items() for n in range(total))])
        with _uninterrupted():  # processes begin with the first submissions
            coming = {(name, n): self._pool.submit(_make, name, n, totals[name]) for name, n in order}
        self.samples = {name: Awaited([coming[name, n] for n in range(total)]) for name, total in totals.items()}

    def close(self) -> None:
        """End the processes; prompts not yet started are not made."""
        self._pool.shutdown(cancel_futures=True)


def _result(coming: Future[PromptSample]) -> PromptSample:
    try:
        return coming.result()
    except BrokenProcessPool as error:
        raise LongreachError(
            "a process that makes prompts died (out of memory? its output is above); use fewer --workers, or 0"
        ) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started inside leave Ctrl-C to this one, which closes them. Here it takes effect after the block."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(sent: bytes) -> None:
    global _maker
    _maker = pickle.loads(sent)


def _make(name: str, number: int, total: int) -> PromptSample:
    return _maker.make(name, number, total)
