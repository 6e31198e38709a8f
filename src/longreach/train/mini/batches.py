"""Training batches, made ahead of time by worker processes."""

from __future__ import annotations

import multiprocessing
import queue
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from longreach.errors import LongreachError
from longreach.train.mini.config import BOS_ID, PAD_ID
from longreach.train.mini.forms import FORMS
from longreach.train.mini.materials import Materials, load_materials
from longreach.train.mini.page import PADDING, TEXT, render

NAMES = ("text", *FORMS)  # what a sequence may be; "text" is plain text


@dataclass(frozen=True)
class Batch:
    """tokens uint16 [B, length + 1]; kinds, of each target, uint8 [B, length]; forms, indices into NAMES, uint8 [B]."""

    length: int
    tokens: np.ndarray
    kinds: np.ndarray
    forms: np.ndarray


def plain(random: Random, length: int, materials: Materials) -> tuple[np.ndarray, np.ndarray]:
    """A stretch of prose (four of five times) or code: tokens and kinds."""
    stream = materials.filler(random, prose=0.8).tokens
    start = random.randrange(max(1, len(stream) - length))
    stretch = stream[start : start + length]
    tokens, kinds = np.full(length + 1, PAD_ID, dtype=np.uint16), np.full(length, PADDING, dtype=np.uint8)
    tokens[0], tokens[1 : 1 + len(stretch)], kinds[: len(stretch)] = BOS_ID, stretch, TEXT
    return tokens, kinds


def draw(random: Random, length: int, materials: Materials, plain_text: float) -> tuple[np.ndarray, np.ndarray, int]:
    """One training sequence: tokens, kinds, and which of NAMES it is."""
    if random.random() < plain_text:
        return *plain(random, length, materials), 0
    name = random.choices(tuple(FORMS), [share for _, share in FORMS.values()])[0]
    page = FORMS[name][0](random, length - 1, materials)
    return *render(materials, page, length), NAMES.index(name)


def batch(materials: Materials, seed: str, length: int, count: int, plain_text: float) -> Batch:
    """`count` sequences, the same for the same seed."""
    random = Random(f"train/{seed}")
    rows = [draw(random, length, materials, plain_text) for _ in range(count)]
    tokens, kinds, forms = zip(*rows, strict=True)
    return Batch(length, np.stack(tokens), np.stack(kinds), np.asarray(forms, dtype=np.uint8))


def _work(folder: str, plain_text: float, requests: Any, results: Any) -> None:
    materials = load_materials(Path(folder))
    while (request := requests.get()) is not None:
        number, seed, length, count = request
        results.put((number, batch(materials, seed, length, count, plain_text)))


class BatchFactory:
    """Worker processes that make batches ahead of time, delivered in the order in which they were asked for."""

    def __init__(self, folder: Path, plain_text: float, workers: int, seed: str):
        context = multiprocessing.get_context("spawn")
        self._requests, self._results = context.Queue(), context.Queue()
        self._seed, self._asked, self._given = seed, 0, 0
        self._ready: dict[int, Batch] = {}
        self._workers = [
            context.Process(target=_work, daemon=True, args=(str(folder), plain_text, self._requests, self._results))
            for _ in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def pending(self) -> int:
        """Batches asked for and not yet taken."""
        return self._asked - self._given

    def ask(self, length: int, count: int) -> None:
        """Queue one batch."""
        self._requests.put((self._asked, f"{self._seed}/{self._asked}", length, count))
        self._asked += 1

    def take(self) -> Batch:
        """The next batch.

        Raises:
            LongreachError: a worker died.
        """
        while self._given not in self._ready:
            try:
                number, made = self._results.get(timeout=20)
                self._ready[number] = made
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    raise LongreachError("a batch worker died; its error is above") from None
        self._given += 1
        return self._ready.pop(self._given - 1)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.terminate()
