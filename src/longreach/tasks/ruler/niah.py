"""Needles in a haystack: eight tasks that differ in haystack, keys, values and questions (RULER, Table 2)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal
from uuid import UUID

from longreach.tasks import haystack
from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.needle import ASKED, BEGUN, INTRO, INTRO_ALL, NEEDLE, digits, word
from longreach.tasks.ruler.text import NOISE, SOURCE, enumeration, hidden
from longreach.tasks.sizing import largest

ASKED_ALL = "What are all the special magic {attribute}s for {key} mentioned in the provided text?"
BEGUN_ALL = "The special magic {attribute}s for {key} mentioned in the provided text are"
MOST_WORDS = 20_000  # pairs of adjective and noun, of some 30,000 that there are
Kind = Literal["word", "number", "uuid"]


@dataclass(frozen=True)
class Niah:
    """haystack: noise (five sentences again and again), essay (real text) or needles (others of the same kind).

    keys: needles with keys of their own, of which `queries` are asked for; values: needles of each key.
    essay: a text file to take instead of the text that is shipped.
    """

    name: str
    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "word"
    value: Kind = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    essay: Path | None = None

    max_new_tokens = 128

    @property
    def source(self) -> str:
        return haystack.named(SOURCE, self.essay)

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        """facts: depths of the needles that are asked for."""
        keys = distinct(random, self.key, self.keys)
        values = iter(distinct(random, self.value, self.keys * self.values))
        needles = [(key, next(values)) for key in keys for _ in range(self.values)]
        placed = [(random.random(), _needle(self, *needle)) for needle in needles]
        asked = keys[: self.queries]
        answers = tuple(value for key, value in needles if key in asked)
        several = len(answers) > 1
        fill = {"attribute": self.value, "key": enumeration(asked)}
        question = (ASKED_ALL if several else ASKED).format(**fill)
        begun = (BEGUN_ALL if several else BEGUN).format(**fill)
        depths = [depth for (depth, _), (key, _) in zip(placed, needles, strict=True) if key in asked]
        beside = count(f"\n\n{question} {begun}")
        intro = (INTRO if self.queries * self.values == 1 else INTRO_ALL).format(attribute=self.value)
        context = self._context(random, placed, room - beside, beside, count, needles, intro)
        return Sample(context, question, begun, answers, {"depths": depths, "keys": asked}, len(intro))

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def _context(
        self,
        random: Random,
        placed: list[tuple[float, str]],
        room: int,
        beside: int,
        count: Count,
        needles: list[tuple[str, str]],
        intro: str,
    ) -> str:
        if self.haystack == "essay":
            return haystack.document(
                random, placed, room, count, intro, essay=self.essay, what=self.name, beside=beside
            )
        keys, values = {key for key, _ in needles}, {value for _, value in needles}
        seed = random.getrandbits(64)

        def text(size: int) -> str:
            if self.haystack == "noise":
                lines = [NOISE] * size
            else:
                again = Random(seed)
                others = distinct(again, self.key, size, keys)
                lines = [_needle(self, key, draw(again, self.value, values)) for key in others]
            return "\n".join([intro, *hidden(lines, placed)])

        most = MOST_WORDS if self.haystack == "needles" and self.key == "word" else 1 << 30
        return text(largest(lambda size: count(text(size)), room, self.name, most=most, beside=beside))


def _needle(task: Niah, key: str, value: str) -> str:
    return NEEDLE.format(attribute=task.value, key=key, value=value)


def draw(random: Random, kind: Kind, taken: Set[str] = frozenset()) -> str:
    """A word (adjective and noun of the evaluation's halves), a number of seven digits, or a UUID; none of `taken`."""
    while True:
        if kind == "number":
            one = digits(random, 7)
        elif kind == "uuid":
            one = str(UUID(int=random.getrandbits(128), version=4))
        else:
            one = word(random)
        if one not in taken:
            return one


def distinct(random: Random, kind: Kind, number: int, taken: Set[str] = frozenset()) -> list[str]:
    """So many different ones, none of `taken`."""
    found: dict[str, None] = {}
    while len(found) < number:
        found[draw(random, kind, taken)] = None
    return list(found)


SINGLE = (
    Niah("niah_single_1", "noise"),
    Niah("niah_single_2", "essay"),
    Niah("niah_single_3", "essay", value="uuid"),
)
MULTI = (
    Niah("niah_multikey_1", "essay", keys=4),
    Niah("niah_multikey_2", "needles"),
    Niah("niah_multikey_3", "needles", key="uuid", value="uuid"),
    Niah("niah_multivalue", "essay", values=4),
    Niah("niah_multiquery", "essay", keys=4, queries=4),
)


def niah(name: str, essay: Path | None = None) -> Niah:
    """The task of that name, one of SINGLE or MULTI."""
    return next(replace(task, essay=essay) for task in (*SINGLE, *MULTI) if task.name == name)
