"""Frequent words extraction: the three most frequent of coded words, counts of a zeta law (RULER, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_lowercase

from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.ruler.text import SOURCE
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
LEAST = 60  # words: of fewer, the third is no clear one


@dataclass(frozen=True)
class FrequentWords:
    """Word k of N in all comes N k^-alpha / zeta(alpha) times; the first is dots, the next three are asked for."""

    name: str = "fwe"
    alpha: float = 2.0
    letters: int = 6

    source = SOURCE
    max_new_tokens = 50

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        codes = list({"".join(random.choice(ascii_lowercase) for _ in range(self.letters)): None for _ in range(2000)})
        seed = random.getrandbits(64)

        def text(size: int) -> str:
            times = self.times(size, len(codes))
            words = [word for word, n in zip([DOTS, *codes], times) for _ in range(n)]
            Random(seed).shuffle(words)
            return f"{INTRO}\n{' '.join(words)}"

        beside = count(f"\n\n{ASKED} {BEGUN}")
        size = largest(lambda size: count(text(size)), room - beside, self.name, LEAST, beside=beside)
        facts = {"words": size, "times": self.times(size, 4)[1:]}
        return Sample(text(size), ASKED, BEGUN, tuple(codes[:3]), facts, len(INTRO))

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def times(self, total: int, words: int) -> list[int]:
        """How often the first `words` words come in a text of `total`."""
        return [int(total * k**-self.alpha / _zeta(self.alpha)) for k in range(1, words + 1)]


@cache
def _zeta(alpha: float) -> float:
    return sum(k**-alpha for k in range(1, 100_000))
