"""Common words extraction: the ten words that a list holds ten times as often as the others (RULER, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.ruler.text import SOURCE, words
from longreach.tasks.sizing import largest

INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often."
)
ASKED = "Question: What are the {common} most common words in the above list?"
BEGUN = "Answer: The top {common} words that appear most often in the list are:"
EXAMPLE = (3, 1, 10)  # times of a common word, times of another, others


@dataclass(frozen=True)
class CommonWords:
    """`common` words `often` times each among others that come `seldom` times each; a worked example stands before."""

    name: str = "cwe"
    common: int = 10
    often: int = 30
    seldom: int = 3

    source = SOURCE
    max_new_tokens = 120

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        fill = {"common": self.common}
        question, begun = ASKED.format(**fill), BEGUN.format(**fill)
        often, seldom, others = EXAMPLE
        mine = words(random)
        shown, mine = mine[: self.common + others], mine[self.common + others :]
        example = f"{self._list(random, shown, often, seldom)}\n{question} {begun} {numbered(shown[: self.common])}"
        seed = random.getrandbits(64)

        def text(size: int) -> str:
            return f"{example}\n\n{self._list(Random(seed), mine[: self.common + size], self.often, self.seldom)}"

        beside, most = count(f"\n\n{question} {begun}"), len(mine) - self.common
        size = largest(lambda size: count(text(size)), room - beside, self.name, most=most, beside=beside)
        return Sample(text(size), question, begun, tuple(mine[: self.common]), {"others": size})

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def _list(self, random: Random, chosen: list[str], often: int, seldom: int) -> str:
        all_words = [w for i, w in enumerate(chosen) for _ in range(often if i < self.common else seldom)]
        random.shuffle(all_words)
        return f"{INTRO}\n{numbered(all_words)}"


def numbered(listed: list[str]) -> str:
    """ "1. a 2. b"."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
