"""Training sequences for any tokenizer: windows of texts, prompts of tasks with their answers, the recipe's data.

A sequence follows from its source, its length and its number alone, so that an interrupted training continues with the
sequences that it would have got. No sequence comes twice.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import pickle
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count as numbers
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from longreach.adapters.transformers import chat, encode
from longreach.errors import InvalidInput, LongreachError
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.perplexity import Text
from longreach.evals.prompting import Counter, fitted
from longreach.tasks.base import Given, Task
from longreach.train.mini import batches as recipe
from longreach.train.mini.checkpoint import DATA_FILES, MANIFEST
from longreach.train.mini.config import Schedule
from longreach.train.mini.materials import Materials, load_materials
from longreach.train.mini.page import ANSWER, CONTEXT, PADDING, TEXT

HELD_OUT = 0.05  # share of the tokens of texts that is measured on and not trained on
SERIES = 64  # samples of a task with one seed
ATTEMPTS = 4  # samples that are tried where one does not fit its length
AHEAD = 2  # batches of each process that are made before they are needed


class Batch(NamedTuple):
    """tokens: int64 [B, T + 1]. kinds: uint8 [B, T], of each target token: PADDING, CONTEXT, TEXT or ANSWER."""

    tokens: np.ndarray
    kinds: np.ndarray

    @property
    def real(self) -> int:
        """Number of target tokens that are not padding."""
        return int((self.kinds != PADDING).sum())


class Place(NamedTuple):
    """A batch: some sequences of `length` tokens from a source, which gave `first` of that length before."""

    length: int
    sequences: int
    source: int
    first: int


@dataclass(frozen=True)
class Cycle:
    """The order of batches: the lengths in turn, from one source after another.

    tokens: of a batch; a longer sequence is a batch of its own.
    """

    lengths: tuple[int, ...]
    tokens: int
    sources: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2:
            raise InvalidInput(f"lengths: expected at least one, of 2 tokens or more, got {list(self.lengths)}")
        if self.tokens < 1:
            raise InvalidInput(f"tokens of a batch: expected at least 1, got {self.tokens}")

    def place(self, number: int) -> Place:
        """Batch `number`."""
        rounds, at = divmod(number, len(self.lengths))
        earlier, source = divmod(rounds, self.sources)
        length = self.lengths[at]
        count = max(1, self.tokens // length)
        before = earlier * self.lengths.count(length) + self.lengths[:at].count(length)
        return Place(length, count, source, count * before)


class Source(ABC):
    """Where training sequences come from. Picklable."""

    @abstractmethod
    def sequences(self, length: int, first: int, count: int) -> Batch:
        """Sequences `first` to `first + count` of `length` target tokens. Raises InvalidInput if there are no more."""

    @abstractmethod
    def held_out(self, length: int, count: int) -> Batch:
        """At most `count` sequences that are never trained on, the same for the same seed."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The source as JSON, for a record."""


def padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]], length: int, pad: int) -> Batch:
    """Sequences as (tokens, kinds of all but the first), cut and padded at their ends to `length` targets.

    Attention is causal: padding at the end changes nothing before it.
    """
    tokens = np.full((len(rows), length + 1), pad, dtype=np.int64)
    kinds = np.full((len(rows), length), PADDING, dtype=np.uint8)
    for row, (ids, what) in enumerate(rows):
        ids = ids[: length + 1]
        tokens[row, : len(ids)] = ids
        kinds[row, : len(ids) - 1] = what[: len(ids) - 1]
    return Batch(tokens, kinds)


def batches_of(prompts: Sequence[Prompt]) -> list[Batch]:
    """Prompts as batches of one sequence each, to measure on."""
    found = []
    for prompt in prompts:
        kinds = np.full((1, len(prompt.tokens) - 1), CONTEXT if prompt.answer else TEXT, dtype=np.uint8)
        kinds[0, kinds.shape[1] - prompt.answer :] = ANSWER
        found.append(Batch(np.asarray([prompt.tokens], dtype=np.int64), kinds))
    return found


class TextSource(Source):
    """Windows of texts. None reaches from one text into another. The end of the longest text is held out.

    Windows follow each other without overlap, in random order. When all were given, they begin elsewhere.
    """

    def __init__(self, texts: Sequence[Text], tokenizer: Any, lengths: Sequence[int], seed: int = 0):
        """lengths: of the sequences to come. Raises InvalidInput if the texts hold too few tokens."""
        self._begin, self._seed, self._texts = encode(tokenizer, ""), seed, [t.to_json() for t in texts]
        self._parts = [np.asarray(text.tokens, dtype=np.int64) for text in texts]
        total, longest = sum(map(len, self._parts)), max(range(len(texts)), key=lambda n: len(self._parts[n]))
        window = self._taken(max(lengths))
        end = self._parts[longest]
        if min(map(self._taken, lengths)) < 1 or len(end) < 2 * window:
            raise InvalidInput(
                f"the longest text has {len(end)} tokens, and sequences of {max(lengths)} need {2 * window}: one to "
                f"train on, one to measure on; give longer texts, or lower --lengths"
            )
        held = min(max(window, math.ceil(HELD_OUT * total)), len(end) // 2)
        self._parts[longest], self._end = end[:-held], end[-held:]
        self._last: tuple[int, int, list[tuple[int, int]]] | None = None  # the order of the last pass

    def _taken(self, length: int) -> int:
        return length + 1 - len(self._begin)

    def sequences(self, length: int, first: int, count: int) -> Batch:
        return self._batch([self._window(length, n) for n in range(first, first + count)], length)

    def held_out(self, length: int, count: int) -> Batch:
        take = self._taken(length)
        starts = range(0, len(self._end) - take + 1, take)
        chosen = [starts[len(starts) * n // count] for n in range(count)] if len(starts) > count else starts
        return self._batch([self._end[at : at + take] for at in chosen], length)

    def describe(self) -> dict[str, Any]:
        return {"kind": "text", "texts": self._texts, "held_out_tokens": len(self._end)}

    def passes(self, length: int, count: int) -> int:
        """How many passes over the texts `count` sequences of this length take."""
        lap = 0
        while count > 0 and lap < self._taken(length):
            count -= self._windows(length, lap)
            lap += 1
        return lap

    def _batch(self, windows: Sequence[np.ndarray], length: int) -> Batch:
        text = [TEXT] * length
        return padded([([*self._begin, *window.tolist()], text) for window in windows], length, 0)

    def _window(self, length: int, number: int) -> np.ndarray:
        take, left = self._taken(length), number
        for lap in range(take):
            if left < self._windows(length, lap):
                part, at = self._order(length, lap)[left]
                return self._parts[part][at : at + take]
            left -= self._windows(length, lap)
        raise InvalidInput(
            f"the texts hold {number - left} different sequences of {length} tokens, and training needs more; give "
            f"more --text, or train for fewer steps"
        )

    def _shift(self, length: int, lap: int) -> int:
        """The token that the windows of a pass over the texts begin with; another one in each pass."""
        take = self._taken(length)
        step = next(n for n in range(int(take * 0.618), 2 * take + 2) if math.gcd(n, take) == 1)
        return lap * step % take

    def _windows(self, length: int, lap: int) -> int:
        shift, take = self._shift(length, lap), self._taken(length)
        return sum(max(0, len(part) - shift) // take for part in self._parts)

    def _order(self, length: int, lap: int) -> list[tuple[int, int]]:
        """(text, first token) of the windows of a pass, in their order."""
        if self._last is None or self._last[:2] != (length, lap):
            shift, take = self._shift(length, lap), self._taken(length)
            places = [(n, at) for n, part in enumerate(self._parts) for at in range(shift, len(part) - take + 1, take)]
            Random(f"{self._seed}/{length}/{lap}").shuffle(places)
            self._last = (length, lap, places)
        return self._last[2]


class TaskSource(Source):
    """Prompts of tasks with their right answers, the tasks in turn.

    Samples differ from those of evaluations, whatever their seed. The texts in which they hide facts do not.
    """

    def __init__(self, tasks: Sequence[Task], tokenizer: Any, lengths: Sequence[int], seed: int = 0):
        """Raises InvalidInput for tasks that do not fit a length, and for data sets, which are for evaluation."""
        for task in tasks:
            if isinstance(task, Given):
                raise InvalidInput(f"{task.name} is a data set for evaluation; train on --text, or on other tasks")
        self._tasks, self._tokenizer, self._seed, self._counter = tuple(tasks), tokenizer, seed, Counter(tokenizer)
        self._pad = tokenizer.pad_token_id or 0
        for length in sorted({*lengths}):
            for number in range(len(tasks)):
                self._sample(length, number, "check")

    @classmethod
    def fitting(
        cls, tasks: Sequence[Task], tokenizer: Any, lengths: Sequence[int], seed: int = 0
    ) -> tuple[TaskSource, dict[str, str]]:
        """Of the tasks that fit all lengths, and why each of the others does not. Raises InvalidInput if none does."""
        kept, left_out = list[Task](), dict[str, str]()
        for task in tasks:
            try:
                cls([task], tokenizer, lengths, seed)
                kept.append(task)
            except InvalidInput as error:
                left_out[task.name] = str(error)
        if not kept:
            raise InvalidInput(f"none of {', '.join(left_out)} fits {list(lengths)} tokens: {min(left_out.values())}")
        return cls(kept, tokenizer, lengths, seed), left_out

    def sequences(self, length: int, first: int, count: int) -> Batch:
        rows = [self._sample(length, number, "train") for number in range(first, first + count)]
        return padded(rows, length, self._pad)

    def held_out(self, length: int, count: int) -> Batch:
        return padded([self._sample(length, number, "held out") for number in range(count)], length, self._pad)

    def describe(self) -> dict[str, Any]:
        return {"kind": "tasks", "tasks": [task.name for task in self._tasks]}

    def _sample(self, length: int, number: int, use: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt and its answer, and the kind of each but the first."""
        number, place = divmod(number, len(self._tasks))
        series, number = divmod(number, SERIES)
        for attempt in range(ATTEMPTS):
            digest = hashlib.sha256(f"{use}/{self._seed}/{length}/{series}/{attempt}".encode()).digest()
            task, seed = self._tasks[place], int.from_bytes(digest[:8], "little")
            try:
                sample, prompt = fitted(task, self._tokenizer, length + 1, seed, number, SERIES, count=self._counter)
                break
            except InvalidInput:  # its random words were too long
                if attempt == ATTEMPTS - 1:
                    raise
        joint = "" if sample.begun == "" and chat(self._tokenizer, ".") is not None else " "
        written = joint + ", ".join(sample.answers)
        answer = list(self._tokenizer(written, add_special_tokens=False, verbose=False).input_ids)
        if self._tokenizer.eos_token_id is not None:
            answer.append(self._tokenizer.eos_token_id)
        return [*prompt, *answer], [CONTEXT] * (len(prompt) - 1) + [ANSWER] * len(answer)


class RecipeSource(Source):
    """Sequences of the recipe of longreach-mini: text and tasks of its own, with keys that evaluations do not use."""

    def __init__(self, folder: Path, tokenizer: Any, seed: int = 0):
        """folder: as `longreach train mini --prepare` writes it. Raises LongreachError, and InvalidInput if the model
        has another tokenizer."""
        if missing := [name for name in DATA_FILES if not (folder / name).is_file()]:
            raise InvalidInput(f"{folder} has no {', '.join(missing)}; make it with longreach train mini --prepare DIR")
        mine = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        if mine != tokenizer.get_vocab():
            raise InvalidInput(
                f"{folder} holds tokens of longreach-mini's tokenizer, and the model has another one; use --text or "
                f"--tasks"
            )
        self._folder, self._seed, self._plain = folder, seed, Schedule().plain_text
        self._sha256 = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()

    def sequences(self, length: int, first: int, count: int) -> Batch:
        return self._made(f"mka/{self._seed}/{length}/{first}", length, count)

    def held_out(self, length: int, count: int) -> Batch:
        return self._made(f"mka held out/{self._seed}/{length}", length, count)

    def describe(self) -> dict[str, Any]:
        return {"kind": "recipe", "folder": self._folder.name, "manifest_sha256": self._sha256}

    def _made(self, seed: str, length: int, count: int) -> Batch:
        made = recipe.batch(_materials(self._folder), seed, length, count, self._plain)
        return Batch(made.tokens.astype(np.int64), made.kinds)


@cache
def _materials(folder: Path) -> Materials:
    return load_materials(folder)


@contextmanager
def stream(sources: Sequence[Source], cycle: Cycle, first: int = 0, workers: int = 0) -> Iterator[Iterator[Batch]]:
    """Batches from number `first` on, without an end, made ahead by `workers` processes; 0: by a thread."""
    pool: Executor
    if workers:
        sent = pickle.dumps((list(sources), cycle))
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(sent,))
        make: Callable[[int], Batch] = _make
    else:
        pool = ThreadPoolExecutor(1)
        make = _Maker(list(sources), cycle).make
    try:
        yield _batches(pool, make, first, AHEAD * max(1, workers))
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(pool: Executor, make: Callable[[int], Batch], first: int, ahead: int) -> Iterator[Batch]:
    coming: deque[Future[Batch]] = deque()
    for number in numbers(first):
        coming.append(pool.submit(make, number))
        if len(coming) > ahead:
            try:
                yield coming.popleft().result()
            except BrokenProcessPool as error:
                raise LongreachError(
                    "a process that makes batches died (out of memory? its output is above); use fewer --workers"
                ) from error


@dataclass(frozen=True)
class _Maker:
    sources: list[Source]
    cycle: Cycle

    def make(self, number: int) -> Batch:
        place = self.cycle.place(number)
        return self.sources[place.source].sequences(place.length, place.first, place.sequences)


_maker: _Maker  # of this process, if it is a worker


def _begin(sent: bytes) -> None:
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    _maker = _Maker(*pickle.loads(sent))


def _make(number: int) -> Batch:
    return _maker.make(number)
