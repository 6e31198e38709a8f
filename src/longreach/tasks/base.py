"""What a task is: it makes samples that fit a length, whatever the tokenizer, and scores answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, runtime_checkable

Count = Callable[[str], int]  # tokens of a text, without special ones


@dataclass(frozen=True)
class Sample:
    """One text and a question about it.

    context: what is read. question: what follows it ("" where the context asks). begun: how the answer begins; in a
    chat it is the assistant's, so that all models are asked to go on with the same words.
    answers: what is expected; how many of them are needed, and how they are matched, is `Task.score`'s affair.
    facts: what else describes the sample (depth, keys, choices), as JSON values.
    instructions: characters at the beginning of context that say what to do; documents follow them.
    joint: what stands between context and question.
    """

    context: str
    question: str
    begun: str
    answers: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    instructions: int = 0
    joint: str = "\n\n"


class Task(Protocol):
    """A generator of samples and the measure of answers. Frozen, and the same for the same random numbers.

    name: as users write it. source: paper or data set it follows. max_new_tokens: what an answer may take.
    """

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        """A sample whose context, question and begun answer take at most `room` tokens, and nearly as many.

        Raises InvalidInput where the task cannot be built in so few.
        """
        ...

    def score(self, answer: str, sample: Sample) -> float:
        """How right an answer is, in [0, 1]; `answer` goes on after sample.begun."""
        ...


@runtime_checkable
class GoesThrough(Protocol):
    """A task whose samples are a series (of depths, of items): it gets the number of the sample and of all samples.

    seed: the same for all of a run.
    """

    def at(self, number: int, total: int, seed: int) -> Task: ...


@runtime_checkable
class Given(Protocol):
    """A task whose texts are given rather than made: `fixed` in order, each cut to a room by `fit`.

    cut(text, keep) gives a text's first and last keep/2 tokens. chat: whether a chat model is asked in its template.
    """

    @property
    def fixed(self) -> tuple[Sample, ...]: ...

    @property
    def chat(self) -> bool: ...

    def fit(self, sample: Sample, room: int, count: Count, cut: Callable[[str, int], str]) -> Sample: ...


@runtime_checkable
class Grouped(Protocol):
    """A task with scores split by facts of its samples: `by` names them (for example "difficulty")."""

    @property
    def by(self) -> tuple[str, ...]: ...


def all_of(answer: str, expected: Sequence[str]) -> float:
    """The share of expected texts that occur in the answer, whatever their case (RULER's string_match_all)."""
    return sum(text.lower() in answer.lower() for text in expected) / len(expected)


def any_of(answer: str, expected: Sequence[str]) -> float:
    """1 where one of the expected texts occurs in the answer, whatever its case (RULER's string_match_part)."""
    return float(any(text.lower() in answer.lower() for text in expected))
