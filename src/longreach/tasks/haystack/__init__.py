"""The evaluation haystack shipped with longreach, and text of a given length cut from it with facts hidden inside."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from random import Random

from longreach.errors import InvalidInput, ModelFileError

SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


@cache
def paragraphs() -> tuple[str, ...]:
    """The haystack's paragraphs. Raises ModelFileError where the text is not the one whose hash is recorded."""
    folder = files(__package__)
    text = (folder / "haystack.txt").read_bytes()
    if hashlib.sha256(text).hexdigest() != sha256():
        raise ModelFileError(
            "the shipped haystack was changed: its hash differs from haystack.json; reinstall longreach"
        )
    return tuple(text.decode().strip().split("\n\n"))


def sha256() -> str:
    """The recorded hash of the haystack."""
    return str(json.loads((files(__package__) / "haystack.json").read_text())["sha256"])


def document(
    random: Random, facts: Sequence[tuple[float, str]], room: int, count: Callable[[str], int], intro: str = ""
) -> str:
    """Real text of at most `room` tokens with each fact put in at a sentence's end near its depth in [0, 1].

    count: tokens of a text. Facts keep the order of their depths. Raises InvalidInput where they do not fit.
    """
    head = [intro] if intro else []
    left = room - count("\n\n".join([*head, *(fact for _, fact in facts)])) - 2 * len(facts) - 4
    if left < 16:
        raise InvalidInput(f"a text of {room} tokens has no room for {len(facts)} facts; ask for a longer one")
    source, special = paragraphs(), count("")
    start, sentences = random.randrange(len(source)), list[tuple[int, str]]()
    size = number = 0
    while True:
        paragraph = source[(start + number) % len(source)]
        tokens = count(f"\n\n{paragraph}") - special
        if size + tokens > left:  # the last paragraph ends with the sentence that still fits
            for sentence in SENTENCE_END.split(paragraph):
                size += count(sentence) - special + 1
                if size > left:
                    break
                sentences.append((number, sentence))
            break
        sentences += [(number, s) for s in SENTENCE_END.split(paragraph)]
        size += tokens
        number += 1
    ends, total = [0], 0
    for _, sentence in sentences:
        total += len(sentence) + 1
        ends.append(total)
    placed: dict[int, list[str]] = {}
    for depth, fact in sorted(facts, key=lambda f: f[0]):
        spot = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * total))
        placed.setdefault(spot, []).append(fact)
    lines: list[list[str]] = [[intro]] if intro else []
    current = None
    for i, (number, sentence) in enumerate(sentences):
        if number != current:
            lines.append([])
            current = number
        lines[-1] += [*placed.get(i, []), sentence]
    lines[-1] += placed.get(len(sentences), [])
    return "\n\n".join(" ".join(line) for line in lines)
