"""Variable tracking: which variables come to hold a value through a chain of assignments (RULER, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase

from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.ruler.text import NOISE, SOURCE, hidden
from longreach.tasks.sizing import largest

INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text."
ASKED = "Question: Find all variables that are assigned the value {value} in the text above."
BEGUN = (
    "Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value {value}, they are:"
)
EXAMPLE_LINES = 5
LETTERS, EXAMPLE_LETTERS = 5, 3  # of a variable's name


@dataclass(frozen=True)
class Tracing:
    """One chain of `hops` assignments after the first, in noise; a small worked example stands before it."""

    name: str = "vt"
    hops: int = 4

    source = SOURCE
    max_new_tokens = 30

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        shown, mine = (names(random, self.hops + 1, letters) for letters in (EXAMPLE_LETTERS, LETTERS))
        used = _value(random)
        example = "{}\n\n{} {} {}".format(*self._part(random, shown, used, EXAMPLE_LINES), " ".join(shown))
        seed = random.getrandbits(64)

        def parts(size: int) -> tuple[str, str, str]:
            again = Random(seed)
            return self._part(again, mine, _value(again, used), size)

        def tokens(size: int) -> int:
            context, question, begun = parts(size)
            return count(f"{example}\n\n{context}\n\n{question} {begun}")

        context, question, begun = parts(largest(tokens, room, self.name))
        return Sample(f"{example}\n\n{context}", question, begun, tuple(mine), {"hops": self.hops}, len(INTRO))

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def _part(self, random: Random, chain: list[str], value: str, size: int) -> tuple[str, str, str]:
        """(text with the chain, question, beginning of the answer)."""
        held = [value, *(f"VAR {name}" for name in chain)]
        depths = sorted(random.random() for _ in chain)
        lines = [(depth, f"VAR {name} = {of}") for depth, name, of in zip(depths, chain, held)]
        text = "\n".join([INTRO, "", *hidden([NOISE] * size, lines)])
        fill = {"value": value, "number": len(chain)}
        return text, ASKED.format(**fill), BEGUN.format(**fill)


def _value(random: Random, used: str = "") -> str:
    """Five digits, not those that are used."""
    while (value := str(random.randrange(10000, 100000))) == used:
        continue
    return value


def names(random: Random, number: int, letters: int) -> list[str]:
    """Different names of `letters` capitals."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(random.choice(ascii_uppercase) for _ in range(letters))] = None
    return list(found)
