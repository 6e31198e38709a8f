"""Training sequences: filler tokens spliced with tokenised needles, questions and answers; made by worker processes.

A rendered sequence, its special tokens spelt out, is the tokenisation of its own text: filler is cut, and needles go
in, only where the tokenizer never merges across (before " Word" after a sentence's end, and after a line break).
Filler holds a few special tokens itself, where documentation spells them ("</s>"): decoding without them loses those.
"""

from __future__ import annotations

import json
import lzma
import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from longreach.errors import LongreachError
from longreach.tasks.needle import Episode, KeySource, evaluation_episode, training_episode
from longreach.train.mini.config import BOS_ID, EOS_ID, PAD_ID

PADDING, CONTEXT, TEXT, ANSWER = range(4)  # what a target token is to the loss
SPACE, LINE, PARAGRAPH = 1, 2, 3  # kinds of places at which filler may be cut


class Filler:
    """A token stream with the places at which it may be cut."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        self.tokens = tokens
        texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())]
        before = np.zeros(len(texts), dtype=np.uint8)  # what may be cut after this token
        after = np.zeros(len(texts), dtype=np.uint8)  # what may be cut before it: bit 1 " Word", bit 2 a line's start
        for i, text in enumerate(texts):
            if text.endswith("\n\n"):
                before[i] = PARAGRAPH
            elif text.endswith(("\n",)) and len(text) > 1 and text[-2] in ".!?:;)":
                before[i] = LINE
            elif text.endswith((".", "!", "?")):
                before[i] = SPACE
            if len(text) > 1 and text[0] == " " and text[1].isupper():
                after[i] = 1
            elif text and not text[0].isspace() and "\ufffd" not in text:
                after[i] = 2
        left, right = before[tokens[:-1]], after[tokens[1:]]
        kind = np.where(left == SPACE, np.where(right == 1, SPACE, 0), np.where(right == 2, left, 0))
        self.places = np.flatnonzero(kind) + 1  # cut before this token
        self.kinds = kind[self.places - 1].astype(np.uint8)
        self.starts = self.places[self.kinds == PARAGRAPH]
        if not len(self.starts):
            raise LongreachError("the filler has no paragraphs to start at")

    def window(self, random: Random, most: int) -> tuple[int, int, int, int]:
        """A stretch of at most `most` tokens: (start, end, first, last), places[first:last] being its cuts."""
        latest = np.searchsorted(self.starts, max(len(self.tokens) - most, self.starts[0]), side="right")
        start = int(self.starts[random.randrange(int(latest))])
        first = int(np.searchsorted(self.places, start))
        last = int(np.searchsorted(self.places, start + most, side="right"))
        return start, int(self.places[last - 1]), first, last


@dataclass(frozen=True)
class Mixture:
    """What a worker draws from."""

    prose: Filler
    code: Filler
    dev: Filler  # prose kept from training, for the accuracy shown while training


def load_mixture(folder: Path, tokenizer: Tokenizer) -> Mixture:
    """Read prose.bin.xz and code.bin.xz (uint16 tokens); the last twentieth of the prose is the dev part."""
    prose, code = (
        np.frombuffer(lzma.decompress((folder / f"{kind}.bin.xz").read_bytes()), dtype=np.uint16)
        for kind in ("prose", "code")
    )
    cut = len(prose) * 19 // 20
    return Mixture(Filler(prose[:cut], tokenizer), Filler(code, tokenizer), Filler(prose[cut:], tokenizer))


class Renderer:
    """Turns episodes and filler into sequences of exactly `length` + 1 tokens."""

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture, extra_words: list[str], plain_text: float):
        self.tokenizer, self.mixture, self.plain_text = tokenizer, mixture, plain_text
        self.train_keys = KeySource(False, extra_words)
        self.dev_keys = KeySource(True)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text, without BOS."""
        return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def text(self, random: Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Plain text: a stretch of prose (two of three times) or code."""
        filler = self.mixture.prose if random.random() < 0.67 else self.mixture.code
        start = random.randrange(max(1, len(filler.tokens) - length))
        tokens = np.full(length + 1, PAD_ID, dtype=np.uint16)
        stretch = filler.tokens[start : start + length]
        tokens[0], tokens[1 : 1 + len(stretch)] = BOS_ID, stretch
        kinds = np.full(length, PADDING, dtype=np.uint8)
        kinds[: len(stretch)] = TEXT
        return tokens, kinds

    def episode(self, random: Random, length: int, episode: Episode, filler: Filler) -> tuple[np.ndarray, np.ndarray]:
        """An episode hidden in filler. Facts and questions that do not fit are left out, the last first.

        Returns:
            tokens uint16 [length + 1] and, for each target (token 1 and on), its kind, uint8 [length].
        """
        needles, asked = list(episode.needles), list(episode.asked)
        statements = self.encode([f" {n.statement}" for n in needles])
        questions = self.encode([n.question for n in needles])
        answers = self.encode([n.answer for n in needles])
        intro = self.encode([episode.intro + "\n\n"])[0] if episode.intro else []
        room = length - len(intro) - 4 - length // 8  # at least an eighth is filler
        cost = [len(s) + len(q) + len(a) + 4 for s, q, a in zip(statements, questions, answers, strict=True)]
        keep = len(needles)
        while keep > 1 and sum(cost[:keep]) > room:
            keep -= 1
        asked = [i for i in asked if i < keep]
        start, end, first, last = filler.window(random, length - len(intro) - 3 - sum(cost[:keep]))
        picks = sorted(random.randrange(first, last) for _ in range(keep))
        spots = [(int(filler.places[p]), int(filler.kinds[p])) for p in picks]
        order = list(range(keep))
        random.shuffle(order)
        alone = [i for i, (_, kind) in zip(order, spots, strict=True) if kind != SPACE]
        ends = {LINE: "\n", PARAGRAPH: "\n\n"}
        kind_of = {i: kind for i, (_, kind) in zip(order, spots, strict=True)}
        for i, ids in zip(alone, self.encode([needles[i].statement + ends[kind_of[i]] for i in alone]), strict=True):
            statements[i] = ids
        parts: list[Any] = [[BOS_ID], intro]
        at = start
        for i, (place, _) in zip(order, spots, strict=True):
            parts += [filler.tokens[at:place], statements[i]]
            at = place
        parts.append(filler.tokens[at:end])
        if int(filler.kinds[last - 1]) == SPACE:  # else the context ends with a line break already
            parts = [self.closed(np.concatenate([np.asarray(p, dtype=np.uint16) for p in parts]))]
        context_end = sum(map(len, parts))
        line = self.encode(["\n"])[0]
        kinds = [CONTEXT] * (context_end - 1)
        for n, i in enumerate(asked):
            lead = line if n else []
            parts += [lead, questions[i], answers[i], [EOS_ID]]
            kinds += [CONTEXT] * (len(lead) + len(questions[i])) + [ANSWER] * (len(answers[i]) + 1)
        tokens = np.concatenate([np.asarray(p, dtype=np.uint16) for p in parts])
        if len(tokens) > length + 1:
            raise LongreachError(f"a rendered sequence has {len(tokens)} tokens where {length + 1} fit")
        pad = length + 1 - len(tokens)
        return (
            np.concatenate([tokens, np.full(pad, PAD_ID, dtype=np.uint16)]),
            np.asarray(kinds + [PADDING] * pad, dtype=np.uint8),
        )

    def closed(self, context: np.ndarray) -> np.ndarray:
        """The context with an empty line after it; its last word's tokens are made anew, since "." and breaks merge."""
        start = len(context) - 1
        while start > 0 and not self.tokenizer.decode([context[start]]).startswith(" "):
            start -= 1
        tail = self.tokenizer.decode(context[start:].tolist()) + "\n\n"
        return np.concatenate([context[:start], np.asarray(self.encode([tail])[0], dtype=np.uint16)])

    def training(self, random: Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One training sequence."""
        if random.random() < self.plain_text:
            return self.text(random, length)
        most = min(24, max(2, length // 40))
        count = random.randrange(1, 3) if random.random() < 0.1 else random.randrange(max(2, most // 3), most + 1)
        filler = self.mixture.prose if random.random() < 0.85 else self.mixture.code
        return self.episode(random, length, training_episode(random, self.train_keys, count), filler)

    def dev(self, random: Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """One sequence like the evaluation's, over prose kept from training."""
        return self.episode(random, length, evaluation_episode(random, self.dev_keys), self.mixture.dev)

    def batch(self, seed: str, length: int, count: int, dev: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """tokens uint16 [count, length + 1] and kinds uint8 [count, length]; the same for the same seed."""
        random = Random(("dev/" if dev else "train/") + seed)
        rows = [(self.dev if dev else self.training)(random, length) for _ in range(count)]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def load_renderer(folder: Path, plain_text: float) -> Renderer:
    """A renderer over what `prepare` wrote."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    extra = json.loads((folder / "words.json").read_text())
    return Renderer(tokenizer, load_mixture(folder, tokenizer), extra, plain_text)


def _work(folder: str, plain_text: float, requests: Any, results: Any) -> None:
    renderer = load_renderer(Path(folder), plain_text)
    while (request := requests.get()) is not None:
        number, seed, length, count, dev = request
        results.put((number, length, *renderer.batch(seed, length, count, dev)))


class BatchFactory:
    """Worker processes that make batches ahead of time, delivered in the order in which they were asked for."""

    def __init__(self, folder: Path, plain_text: float, workers: int, seed: str):
        context = multiprocessing.get_context("spawn")
        self._requests, self._results = context.Queue(), context.Queue()
        self._seed, self._asked, self._given = seed, 0, 0
        self._ready: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}
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

    def ask(self, length: int, count: int, dev: bool = False) -> None:
        """Queue one batch."""
        self._requests.put((self._asked, f"{self._seed}/{self._asked}", length, count, dev))
        self._asked += 1

    def take(self) -> tuple[int, np.ndarray, np.ndarray]:
        """The next batch: (length, tokens, kinds).

        Raises:
            LongreachError: a worker died.
        """
        while self._given not in self._ready:
            try:
                number, *batch = self._results.get(timeout=20)
                self._ready[number] = tuple(batch)
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    raise LongreachError("a batch worker died; its error is above") from None
        self._given += 1
        return self._ready.pop(self._given - 1)

    def waiting(self) -> Iterator[int]:
        """Numbers of finished batches not yet taken (how far ahead the workers are)."""
        return iter(sorted(self._ready))

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.terminate()
