"""One needle at depths in order, for the map of length and depth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from longreach.tasks import haystack
from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.needle import ASKED, BEGUN, INTRO, NEEDLE, digits
from longreach.tasks.ruler.niah import draw


@dataclass(frozen=True)
class Sweep:
    """A number of seven digits in real text, `depth` deep (0 at its beginning, 1 at its end).

    essay: a text file to take instead of the text that is shipped.
    """

    depth: float = 0.5
    name: str = "needle_sweep"
    essay: Path | None = None

    max_new_tokens = 16

    @property
    def source(self) -> str:
        return haystack.named("needle in a haystack (Kamradt, 2023), in RULER's wording", self.essay)

    def at(self, number: int, total: int, seed: int) -> Sweep:
        """The task of sample `number` of `total`: depths are evenly spaced, both ends included."""
        return replace(self, depth=number / (total - 1) if total > 1 else 0.5)

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        key, value = draw(random, "word"), digits(random, 7)
        fill = {"attribute": "number", "key": key, "value": value}
        question, begun = ASKED.format(**fill), BEGUN.format(**fill)
        beside = count(f"\n\n{question} {begun}")
        fact, intro = [(self.depth, NEEDLE.format(**fill))], INTRO.format(**fill)
        context = haystack.document(
            random, fact, room - beside, count, intro, essay=self.essay, what=self.name, beside=beside
        )
        return Sample(context, question, begun, (value,), {"depth": self.depth, "keys": [key]}, len(intro))

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)
