"""The evaluation haystack shipped with longreach, and text of a given length cut from it with facts hidden inside."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random

from longreach.errors import InvalidInput, ModelFileError
from longreach.tasks.sizing import FULL, too_short
from longreach.tasks.sources import of_file

SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")
LEAST = 16  # tokens of real text, or it is no haystack


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


@cache
def read(path: Path) -> tuple[str, ...]:
    """Paragraphs of a text file, which blank lines part. Raises InvalidInput where it holds none or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the haystack's path") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 (byte {error.start}); a haystack is plain text") from error
    found = tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())
    if not found:
        raise InvalidInput(f"{path} is empty; a haystack is plain text, its paragraphs parted by blank lines")
    return found


def named(source: str, essay: Path | None) -> str:
    """A task's source, and where its haystack comes from unless that is the shipped one."""
    return source if essay is None or not essay.is_file() else of_file(source, essay, "haystack ")


def sha256() -> str:
    """The recorded hash of the haystack."""
    return str(json.loads((files(__package__) / "haystack.json").read_text())["sha256"])


def document(
    random: Random,
    facts: Sequence[tuple[float, str]],
    room: int,
    count: Callable[[str], int],
    intro: str = "",
    *,
    essay: Path | None = None,
    what: str | None = None,
    beside: int = 0,
) -> str:
    """Real text of at most `room` tokens with each fact put in at a sentence's end near its depth in [0, 1].

    count: tokens of a text. Facts keep the order of their depths. essay: a text file instead of the shipped text.
    Raises InvalidInput where they do not fit with some text; it names the task `what`, whose question takes `beside`
    more tokens.
    """
    head = [intro] if intro else []
    left = room - count("\n\n".join([*head, *(fact for _, fact in facts)])) - 2 * len(facts) - 4
    source, special = paragraphs() if essay is None else read(essay), count("")
    start, sentences = random.randrange(len(source)), list[tuple[int, str]]()
    least = max(LEAST, count(source[start].split(" ", 1)[0]) - special + 1)
    if left < least:
        least += room - left
        if what is not None:
            raise too_short(what, least + beside, room + beside)
        raise InvalidInput(
            f"a text of {room} tokens has no room for {len(facts)} facts; ask for a longer one, {least} tokens or more"
        )
    size = number = 0
    while True:
        paragraph = source[(start + number) % len(source)]
        tokens = count(f"\n\n{paragraph}") - special
        if size + tokens > left:  # the last paragraph ends with the sentence that still fits
            for sentence in SENTENCE_END.split(paragraph):
                tokens = count(sentence) - special + 1
                if size + tokens > left:
                    if size < FULL * left:  # a long one is cut, rather than leave so much empty
                        part = _beginning(sentence, left - size - 1 + special, count)
                        sentences += [(number, part)] if part else []
                    break
                sentences.append((number, sentence))
                size += tokens
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


def _beginning(sentence: str, room: int, count: Callable[[str], int]) -> str:
    """As many of its first words as take `room` tokens."""
    words = sentence.split(" ")
    fitting = bisect_right(range(1, len(words) + 1), room, key=lambda size: count(" ".join(words[:size])))
    return " ".join(words[:fitting])
