"""What RULER's tasks are made of: haystacks with things hidden in them, and words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Literal, get_args

from longreach.errors import UnknownName
from longreach.tasks import haystack
from longreach.tasks.words import ADJECTIVES, NOUNS, half

SOURCE = "RULER (Hsieh et al., 2024, arXiv:2404.06654)"
Form = Literal["longreach", "official"]  # "official": the text that RULER's own generators write
FORMS = get_args(Form)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def hidden(lines: Sequence[str], things: Sequence[tuple[float, str]]) -> list[str]:
    """Lines with each thing put in at its depth in [0, 1], a line of its own; things of one depth keep their order."""
    found: list[str] = []
    waiting = sorted(things, key=lambda thing: thing[0])
    for number, line in enumerate(lines):
        while waiting and waiting[0][0] * len(lines) <= number:
            found.append(waiting.pop(0)[1])
        found.append(line)
    return found + [thing for _, thing in waiting]


def check_form(form: str) -> None:
    """Raise UnknownName for no form."""
    if form not in FORMS:
        raise UnknownName("form", form, FORMS)


def source_of(form: Form) -> str:
    """Paper, and whose text it is where that is RULER's own."""
    return SOURCE if form == "longreach" else f"{SOURCE}, in the form of its generators"


@cache
def plain_words() -> tuple[str, ...]:
    """Words of the haystack, each once."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", " ".join(haystack.paragraphs())))))


@cache
def _joined_words() -> tuple[str, ...]:
    """Every adjective with every noun, written as one word."""
    return tuple(a + n for a in half(ADJECTIVES, True) for n in half(NOUNS, True))


def words(random: Random) -> list[str]:
    """Plain words in random order, then, for texts that take more, adjectives and nouns written as one."""
    plain, joined = list(plain_words()), list(_joined_words())
    random.shuffle(plain)
    random.shuffle(joined)
    return list(dict.fromkeys(plain + joined))


def enumeration(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b, and c"."""
    if len(words) < 3:
        return " and ".join(words)
    return ", ".join(words[:-1]) + ", and " + words[-1]
