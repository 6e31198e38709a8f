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


@dataclass(frozen=True)
class Form:
    """How often a common word and another come in the list, and in the worked example before it, which has `others`."""

    often: int
    seldom: int
    shown_often: int
    shown_seldom: int
    others: int


LONG, SHORT = Form(30, 3, 10, 3, 30), Form(6, 1, 3, 1, 10)
LENGTH = 3800  # tokens of prompt from which the list is long: lengths of 4,096, less room for answer and template


@dataclass(frozen=True)
class CommonWords:
    """`common` words that come several times as often as the others; a worked example stands before the list."""

    name: str = "cwe"
    common: int = 10

    source = SOURCE
    max_new_tokens = 120

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        fill, form = {"common": self.common}, LONG if room >= LENGTH else SHORT
        question, begun = ASKED.format(**fill), BEGUN.format(**fill)
        mine, shown = words(random), self.common + form.others
        example = self.worked(random, mine[:shown], form)
        mine = mine[shown:]
        seed = random.getrandbits(64)

        def text(size: int) -> str:
            return f"{example}\n\n{self.listed(Random(seed), mine[: self.common + size], form.often, form.seldom)}"

        beside, most = count(f"\n\n{question} {begun}"), len(mine) - self.common
        size = largest(lambda size: count(text(size)), room - beside, self.name, most=most, beside=beside)
        return Sample(text(size), question, begun, tuple(mine[: self.common]), {"others": size}, len(INTRO))

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def worked(self, random: Random, chosen: list[str], form: Form) -> str:
        """A list with its question and answer; the first `common` words are the common ones."""
        text = self.listed(random, chosen, form.shown_often, form.shown_seldom)
        asked = f"{ASKED} {BEGUN}".format(common=self.common)
        return f"{text}\n{asked} {numbered(chosen[: self.common])}"

    def listed(self, random: Random, chosen: list[str], often: int, seldom: int) -> str:
        """The words, numbered, in random order; the first `common` of them come often."""
        all_words = [w for i, w in enumerate(chosen) for _ in range(often if i < self.common else seldom)]
        random.shuffle(all_words)
        return f"{INTRO}\n{numbered(all_words)}"


def numbered(listed: list[str]) -> str:
    """ "1. a 2. b"."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
