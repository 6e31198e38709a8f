"""Needles in a haystack: eight tasks that differ in haystack, keys, values and questions (RULER, Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal
from uuid import UUID

from longreach.tasks import haystack
from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.needle import ASKED, BEGUN, INTRO, NEEDLE, digits
from longreach.tasks.ruler.text import NOISE, SOURCE, enumeration, hidden
from longreach.tasks.sizing import largest
from longreach.tasks.words import ADJECTIVES, NOUNS, half

ASKED_ALL = "What are all the special magic {attribute}s for {key} mentioned in the provided text?"
BEGUN_ALL = "The special magic {attribute}s for {key} mentioned in the provided text are"
MOST_WORDS = 20_000  # pairs of adjective and noun, of some 30,000 that there are
Kind = Literal["word", "number", "uuid"]


@dataclass(frozen=True)
class Niah:
    """haystack: noise (five sentences again and again), essay (real text) or needles (others of the same kind).

    keys: needles with keys of their own, of which `queries` are asked for; values: needles of each key.
    """

    name: str
    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "word"
    value: Kind = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    source = SOURCE
    max_new_tokens = 128

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        """facts: depths of the needles that are asked for."""
        keys = distinct(random, self.key, self.keys)
        needles = [(key, draw(random, self.value)) for key in keys for _ in range(self.values)]
        placed = [(random.random(), _needle(self, *needle)) for needle in needles]
        asked = keys[: self.queries]
        answers = tuple(value for key, value in needles if key in asked)
        several = len(answers) > 1
        fill = {"attribute": self._attribute, "key": enumeration(asked)}
        question = (ASKED_ALL if several else ASKED).format(**fill)
        begun = (BEGUN_ALL if several else BEGUN).format(**fill)
        depths = [depth for (depth, _), (key, _) in zip(placed, needles, strict=True) if key in asked]
        left = room - count(f"\n\n{question} {begun}")
        context = self._context(random, placed, left, count, {*keys})
        return Sample(context, question, begun, answers, {"depths": depths, "keys": asked})

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    @property
    def _attribute(self) -> str:
        return self.value

    def _context(
        self, random: Random, placed: list[tuple[float, str]], room: int, count: Count, taken: set[str]
    ) -> str:
        intro = INTRO.format(attribute=self._attribute)
        if self.haystack == "essay":
            return haystack.document(random, placed, room, count, intro)
        seed = random.getrandbits(64)

        def text(size: int) -> str:
            if self.haystack == "noise":
                lines = [NOISE] * size
            else:
                again = Random(seed)
                others = distinct(again, self.key, size, taken)
                lines = [_needle(self, key, draw(again, self.value)) for key in others]
            return "\n".join([intro, *hidden(lines, placed)])

        most = MOST_WORDS if self.haystack == "needles" and self.key == "word" else 1 << 30
        return text(largest(lambda size: count(text(size)), room, self.name, most=most))


def _needle(task: Niah, key: str, value: str) -> str:
    return NEEDLE.format(attribute=task.value, key=key, value=value)


def draw(random: Random, kind: Kind) -> str:
    """A word (adjective and noun, of the evaluation's halves), a number of seven digits, or a UUID."""
    if kind == "number":
        return digits(random, 7)
    if kind == "uuid":
        return str(UUID(int=random.getrandbits(128), version=4))
    return f"{random.choice(half(ADJECTIVES, True))} {random.choice(half(NOUNS, True))}"


def distinct(random: Random, kind: Kind, number: int, taken: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """So many different ones, none of `taken`."""
    found: dict[str, None] = {}
    while len(found) < number:
        one = draw(random, kind)
        if one not in taken:
            found[one] = None
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
