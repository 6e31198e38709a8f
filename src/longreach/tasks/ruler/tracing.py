"""Variable tracking: which variables come to hold a value through a chain of assignments (RULER, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase

from longreach.tasks.base import Count, Sample, all_of
from longreach.tasks.ruler.text import NOISE, Form, check_form, hidden, source_of
from longreach.tasks.sizing import largest

INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text."
ASKED = "Question: Find all variables that are assigned the value {value} in the text above."
BEGUN = (
    "Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value {value}, they are:"
)
EXAMPLE_LINES = 5
EXAMPLE_TOKENS = 500  # of the official form's example, which has as many lines of noise as fit; 12 of 30 tokens each
LETTERS, EXAMPLE_LETTERS = 5, 3  # of a variable's name


@dataclass(frozen=True)
class Tracing:
    """One chain of `hops` assignments after the first, in noise; a small worked example stands before it.

    form: "official" writes the text as RULER's generator does: a space ends each line of the chain after its first, and
    the beginning of the answer; the example has as many lines of noise as fit 500 tokens; the question follows in the
    next line.
    """

    name: str = "vt"
    hops: int = 4
    form: Form = "longreach"

    max_new_tokens = 30

    def __post_init__(self) -> None:
        check_form(self.form)

    @property
    def source(self) -> str:
        return source_of(self.form)

    @property
    def joint(self) -> str:
        """Between text and question."""
        return "\n\n" if self.form == "longreach" else "\n"

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        shown, mine = (names(random, self.hops + 1, letters) for letters in (EXAMPLE_LETTERS, LETTERS))
        used = _value(random)
        example = self._example(random, shown, used, count)
        seed = random.getrandbits(64)

        def parts(size: int) -> tuple[str, str, str]:
            again = Random(seed)
            return self._part(again, mine, _value(again, used), size)

        def tokens(size: int) -> int:
            context, question, begun = parts(size)
            return count(f"{example}\n\n{context}{self.joint}{question} {begun}")

        least = 1 if self.form == "longreach" else len(mine)
        context, question, begun = parts(largest(tokens, room, self.name, least))
        facts = {"hops": self.hops}
        return Sample(f"{example}\n\n{context}", question, begun, tuple(mine), facts, len(INTRO), self.joint)

    def score(self, answer: str, sample: Sample) -> float:
        return all_of(answer, sample.answers)

    def _example(self, random: Random, shown: list[str], used: str, count: Count) -> str:
        """The worked example, with its answer."""

        def text(size: int, random: Random) -> str:
            context, question, begun = self._part(random, shown, used, size)
            return f"{context}{self.joint}{question} {begun}"

        size = EXAMPLE_LINES
        if self.form == "official":
            size, seed = len(shown), random.getrandbits(64)
            while count(text(size + 1, Random(seed))) <= EXAMPLE_TOKENS:
                size += 1
            random = Random(seed)
        return f"{text(size, random)} {' '.join(shown)}"

    def _part(self, random: Random, chain: list[str], value: str, size: int) -> tuple[str, str, str]:
        """(text with the chain, question, beginning of the answer)."""
        held = [value, *(f"VAR {name}" for name in chain)]
        fill = {"value": value, "number": len(chain)}
        question, begun = ASKED.format(**fill), BEGUN.format(**fill)
        if self.form == "official":
            links = [f"VAR {name} = {of}{' ' * (n > 0)}" for n, (name, of) in enumerate(zip(chain, held))]
            text = "\n".join([INTRO, "", *_between([NOISE] * size, links, random)])
            return text, question, f"{begun} "
        depths = sorted(random.random() for _ in chain)
        lines = [(depth, f"VAR {name} = {of}") for depth, name, of in zip(depths, chain, held)]
        return "\n".join([INTRO, "", *hidden([NOISE] * size, lines)]), question, begun


def official(name: str) -> Tracing:
    """The task in RULER's own form, under another name, so that records of the two are not compared."""
    return Tracing(name, form="official")


def _between(lines: list[str], links: list[str], random: Random) -> list[str]:
    """Lines with the links in order before different ones of them."""
    before = dict(zip(sorted(random.sample(range(len(lines)), len(links))), links, strict=True))
    return [part for n, line in enumerate(lines) for part in ((before[n], line) if n in before else (line,))]


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
