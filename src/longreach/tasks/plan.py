"""Long generation: a plan in the prompt is to be written out, item by item. Does the answer follow it to its end?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

from longreach.errors import InvalidInput
from longreach.tasks import haystack
from longreach.tasks.base import Count, Sample
from longreach.tasks.ruler.text import plain_words

INTRO = "This is a plan of {items} numbered items:"
ASKED = (
    "Write the {items} items of the plan above, in order, one a line, each with its number and its word, and a "
    "sentence about it."
)
BEGUN = "1. {first}"
A_LINE = 24  # tokens of an answer for each item


@dataclass(frozen=True)
class Plan:
    """`items` numbered words to be written out in order; the score is the finish rate, the share that was.

    The plan stands at a random depth of real text, so that it has to be looked up again and again.
    essay: a text file to take instead of the text that is shipped.
    """

    items: int = 20
    name: str = "plan"
    essay: Path | None = None

    def __post_init__(self) -> None:
        most = len(plain_words())
        if not 2 <= self.items <= most:
            raise InvalidInput(f"{self.name}: expected 2 to {most} items, got {self.items}")

    @property
    def source(self) -> str:
        return haystack.named(
            "longreach: finish rate of a numbered plan, after LongGenBench (Wu et al., 2024)", self.essay
        )

    @property
    def max_new_tokens(self) -> int:
        return self.items * A_LINE

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        words = random.sample(plain_words(), self.items)
        plan = " ".join([INTRO.format(items=self.items), *(f"{i}. {w}." for i, w in enumerate(words, 1))])
        question, begun = ASKED.format(items=self.items), BEGUN.format(first=words[0])
        depth = random.random()
        beside = count(f"\n\n{question} {begun}")
        context = haystack.document(
            random, [(depth, plan)], room - beside, count, essay=self.essay, what=self.name, beside=beside
        )
        return Sample(context, question, begun, tuple(words), {"depth": depth, "items": self.items})

    def score(self, answer: str, sample: Sample) -> float:
        """Items after the first written as "number. word"; what follows a gap counts, what comes late does not."""
        done, place = 1, 0
        for number, word in enumerate(sample.answers[1:], 2):
            found = re.compile(rf"\b{number}[.):]\s*{re.escape(word)}\b", re.IGNORECASE).search(answer, place)
            if found:
                done, place = done + 1, found.end()
        return (done - 1) / (self.items - 1)
