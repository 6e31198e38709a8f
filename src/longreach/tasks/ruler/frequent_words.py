"""Frequent words extraction: the three most frequent of coded words, counts of a zeta law (RULER, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_lowercase

from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.ruler.text import Form, check_form, source_of
from longreach.tasks.sizing import largest

INTRO = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words."
)
ASKED = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
BEGUN = "Answer: According to the coded text above, the three most frequently appeared words are:"
DOTS = "...."
OFFICIAL_DOTS = "..."  # while the question names four
BETWEEN = {"longreach": "\n", "official": " "}  # instruction and words
JOINT = {"longreach": "\n\n", "official": "\n"}  # words and question
LEAST = 60  # words: of fewer, the third is no clear one


@dataclass(frozen=True)
class FrequentWords:
    """Word k of N in all comes N k^-alpha / zeta(alpha) times; the first is dots, the next three are asked for.

    form: "official" writes the text as RULER's generator does: three dots, the words behind the instruction in the same
    line, the question in the next one.
    """

    name: str = "fwe"
    alpha: float = 2.0
    letters: int = 6
    form: Form = "longreach"

    max_new_tokens = 50

    def __post_init__(self) -> None:
        check_form(self.form)

    @property
    def source(self) -> str:
        return source_of(self.form)

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        codes = list({"".join(random.choice(ascii_lowercase) for _ in range(self.letters)): None for _ in range(2000)})
        seed, dots = random.getrandbits(64), DOTS if self.form == "longreach" else OFFICIAL_DOTS

        def text(size: int) -> str:
            times = self.times(size, len(codes))
            words = [word for word, n in zip([dots, *codes], times) for _ in range(n)]
            Random(seed).shuffle(words)
            return f"{INTRO}{BETWEEN[self.form]}{' '.join(words)}"

        joint = JOINT[self.form]
        beside = count(f"{joint}{ASKED} {BEGUN}")
        size = largest(lambda size: count(text(size)), room - beside, self.name, LEAST, beside=beside)
        facts = {"words": size, "times": self.times(size, 4)[1:]}
        return Sample(text(size), ASKED, BEGUN, tuple(codes[:3]), facts, len(INTRO), joint)

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def times(self, total: int, words: int) -> list[int]:
        """How often the first `words` words come in a text of `total`."""
        return [int(total * k**-self.alpha / _zeta(self.alpha)) for k in range(1, words + 1)]


@cache
def _zeta(alpha: float) -> float:
    return sum(k**-alpha for k in range(1, 100_000))


def official(name: str) -> FrequentWords:
    """The task in RULER's own form, under another name, so that records of the two are not compared."""
    return FrequentWords(name, form="official")
