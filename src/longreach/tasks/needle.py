"""A needle in a haystack, as text: a fact to hide in filler, the question about it, its answer.

The wording is that of RULER's needle tasks (Hsieh et al., 2024, arXiv:2404.06654).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from longreach.tasks.words import ADJECTIVES, NOUNS, evaluation_words, half

NEEDLE = "One of the special magic {attribute}s for {key} is: {value}."
INTRO = (  # where one value is asked for
    "A special magic {attribute} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {attribute} afterwards."
)
INTRO_ALL = (
    "Some special magic {attribute}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {attribute}s afterwards."
)
ASKED = "What is the special magic {attribute} for {key} mentioned in the provided text?"
BEGUN = "The special magic {attribute} for {key} mentioned in the provided text is"
QUESTION = f"{ASKED} {BEGUN}"


@dataclass(frozen=True)
class Needle:
    """One hidden fact and the question whose answer it holds."""

    key: str
    value: str
    statement: str
    question: str  # ends where the answer, a space and the value, goes on


@cache
def _halves() -> tuple[list[str], list[str]]:
    reserved = evaluation_words()
    adjectives, nouns = ([w for w in half(words, True) if w in reserved] for words in (ADJECTIVES, NOUNS))
    return adjectives, nouns


def needle(random: Random) -> Needle:
    """A fresh fact: an adjective and a noun, and a number of seven digits."""
    key, value = word(random), digits(random, 7)
    fill = {"attribute": "number", "key": key, "value": value}
    return Needle(key, value, NEEDLE.format(**fill), QUESTION.format(**fill))


def word(random: Random) -> str:
    """An adjective and a noun of the evaluation's halves, with a hyphen."""
    adjectives, nouns = _halves()
    return f"{random.choice(adjectives)}-{random.choice(nouns)}"


def digits(random: Random, count: int) -> str:
    """A number of exactly `count` digits."""
    return str(random.randrange(10 ** (count - 1), 10**count))
