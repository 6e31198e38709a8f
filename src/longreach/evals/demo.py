"""Facts hidden in real text, asked of a model with each method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from longreach.adapters.transformers import (
    Answer,
    Reader,
    attach,
    check_length,
    encode,
    share,
    stop_tokens,
    unfit_methods,
)
from longreach.cache import CacheConfig
from longreach.evals.methods import pairings
from longreach.evals.progress import Progress, unseen
from longreach.evals.read_shares import ReadShares
from longreach.methods.registry import choose
from longreach.tasks import haystack
from longreach.tasks.needle import INTRO_ALL, Needle, needle

DEPTHS = (0.1, 0.5, 0.9)
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class AnswerRow:
    """The answer to one question."""

    depth: float
    key: str
    expected: str
    answer: str
    right: bool
    question_seconds: float


@dataclass(frozen=True)
class Row:
    """One method's answers for every fact.

    read_seconds: reading the document, once for all methods with the same prefill. first_token_seconds: that and
    the question, mean over the questions; seconds_per_token: mean decode step past a warm-up, None if there was none.
    """

    prefill: str
    decode: str
    answers: tuple[AnswerRow, ...]
    prefill_reads: ReadShares | None
    decode_reads: ReadShares | None
    read_seconds: float
    first_token_seconds: float
    seconds_per_token: float | None


class Demo:
    """A document of at most `length` tokens with question and answer, its facts, and who is asked.

    left_out: methods that are not, since they do not fit the model without options, and why. cache: its place in
    memory; its capacity is that of the document with a question and its answer.
    Raises InvalidInput where the facts do not fit, or the model's context is shorter than `length`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, length: int = 4096, seed: int = 0, cache: CacheConfig | None = None
    ):  # fmt: skip
        check_length(model, length - ANSWER_TOKENS, ANSWER_TOKENS)
        self.model, self.tokenizer, self.left_out = model, tokenizer, unfit_methods(model)
        random = Random(f"demo/{seed}")
        facts = _different(random, len(DEPTHS))
        self.placed = tuple(zip(DEPTHS, facts, strict=True))

        def count(text: str) -> int:
            return len(encode(tokenizer, text))

        room = length - ANSWER_TOKENS - max(count("\n\n" + f.question) for f in facts)
        statements = [(depth, fact.statement) for depth, fact in self.placed]
        text = haystack.document(random, statements, room, count, INTRO_ALL.format(attribute="number"))
        prompts = [encode(tokenizer, f"{text}\n\n{f.question}") for f in facts]
        self.document, self.questions = share(prompts, encode(tokenizer, f"{text}\n\nWhy?"))
        self.tokens, self.characters = len(encode(tokenizer, text)), len(text)
        longest = len(self.document) + max(map(len, self.questions)) + ANSWER_TOKENS
        self.room = replace(cache or CacheConfig(), capacity=longest)

    def rows(self, progress: Progress = unseen) -> Iterator[Row]:
        """Ask every question with every method; the document is read once per prefill method."""
        stop = stop_tokens(self.model, self.tokenizer)
        for prefill, decodes in pairings(left_out=self.left_out):
            with attach(self.model, prefill=prefill, cache=self.room) as session:
                methods = [choose("decode", decode) for decode in decodes]
                session.prepare(*methods)
                reader = Reader(session)
                with progress(f"reading, {prefill}", len(self.document)) as advance:
                    logits = reader.read(self.document, advance)
                reads = [ReadShares.of(session.report(method), "prefill") for method in methods]
                for decode, method, prefill_reads in zip(decodes, methods, reads, strict=True):
                    session.switch(method)
                    reader.warm_up(logits, ANSWER_TOKENS)  # what a first step compiles is in no time
                    answers = [Answer() for _ in self.questions]
                    with progress(f"asking, {decode}", len(answers)) as advance:
                        for question, answer in zip(self.questions, answers, strict=True):
                            list(reader.ask(question, ANSWER_TOKENS, stop, answer))
                            advance(1)
                    asked = [a.first_token_seconds for a in answers]
                    steps = sum(a.steps for a in answers)
                    yield Row(
                        prefill,
                        decode,
                        tuple(self._said(d, f, a) for (d, f), a in zip(self.placed, answers, strict=True)),
                        prefill_reads,
                        ReadShares.of(session.report(), "decode"),
                        reader.read_seconds,
                        reader.read_seconds + sum(asked) / len(asked),
                        sum(a.decode_seconds for a in answers) / steps if steps else None,
                    )

    def _said(self, depth: float, fact: Needle, answer: Answer) -> AnswerRow:
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        return AnswerRow(depth, fact.key, fact.value, text, fact.value in text, answer.first_token_seconds)


def _different(random: Random, count: int) -> list[Needle]:
    """Facts with different keys and values, so that each question has one answer."""
    found: list[Needle] = []
    while len(found) < count:
        fact = needle(random)
        if not any(fact.key == other.key or fact.value == other.value for other in found):
            found.append(fact)
    return found
