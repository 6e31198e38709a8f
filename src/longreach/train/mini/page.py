"""A training sequence: something to read, then questions about it with their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from longreach.errors import LongreachError
from longreach.train.mini.config import BOS_ID, EOS_ID, PAD_ID
from longreach.train.mini.filler import LINE, PARAGRAPH, SPACE, Filler
from longreach.train.mini.materials import Materials

PADDING, CONTEXT, TEXT, ANSWER = range(4)  # what a target token is to the loss


@dataclass(frozen=True)
class Exchange:
    """question: ends where the answer goes on. answer: begins with a space, or where a plan goes on after a word."""

    question: str
    answer: str


@dataclass(frozen=True)
class Page:
    """Tokens of a context, which ends with a line break, and of the questions and answers after it."""

    context: list[int]
    exchanges: list[tuple[list[int], list[int]]]


def asked(materials: Materials, exchanges: Sequence[Exchange], room: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of the first exchanges that fit the room together."""
    questions = materials.encode([e.question for e in exchanges])
    answers = materials.encode([e.answer for e in exchanges])
    kept = list(zip(questions, answers, strict=True))
    while kept and taken(kept) > room:
        kept.pop()
    return kept


def taken(exchanges: Sequence[tuple[list[int], list[int]]]) -> int:
    """Tokens that exchanges take: each question stands on a line of its own, each answer has an end."""
    return sum(len(question) + len(answer) + 2 for question, answer in exchanges)


def render(materials: Materials, page: Page, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A page as a training sequence.

    Returns:
        tokens uint16 [length + 1] and, for each target (token 1 and on), its kind, uint8 [length].
    """
    line = materials.tokens("\n")
    tokens = [BOS_ID, *page.context]
    kinds = [CONTEXT] * len(page.context)
    for number, (question, answer) in enumerate(page.exchanges):
        lead = line if number else []
        tokens += [*lead, *question, *answer, EOS_ID]
        kinds += [CONTEXT] * (len(lead) + len(question)) + [ANSWER] * (len(answer) + 1)
    if len(tokens) > length + 1:
        raise LongreachError(f"a rendered sequence has {len(tokens)} tokens where {length + 1} fit")
    pad = length + 1 - len(tokens)
    return np.asarray(tokens + [PAD_ID] * pad, dtype=np.uint16), np.asarray(kinds + [PADDING] * pad, dtype=np.uint8)


def hidden(
    random: Random, materials: Materials, filler: Filler, statements: Sequence[str], room: int, intro: str = ""
) -> list[int]:
    """Real text of at most `room` tokens with the statements put in, in their order, at ends of sentences and lines."""
    head = materials.tokens(f"{intro}\n\n") if intro else []
    spaced = materials.encode([f" {s}" for s in statements])
    cost = len(head) + sum(map(len, spaced)) + 2 * len(statements) + 3
    start, end, first, last = filler.window(random, room - cost)
    picks = sorted(random.randrange(first, last) for _ in statements)
    parts: list[int] = list(head)
    at = start
    for statement, ids, pick in zip(statements, spaced, picks, strict=True):
        place, kind = int(filler.places[pick]), int(filler.kinds[pick])
        parts += filler.tokens[at:place].tolist()
        parts += ids if kind == SPACE else materials.tokens(statement + {LINE: "\n", PARAGRAPH: "\n\n"}[kind])
        at = place
    parts += filler.tokens[at:end].tolist()
    return closed(materials, parts) if int(filler.kinds[last - 1]) == SPACE else parts


def closed(materials: Materials, context: list[int]) -> list[int]:
    """The context with an empty line after it; its last word is tokenised again, since "." and breaks merge."""
    start = len(context) - 1
    while start > 0 and not materials.tokenizer.decode([context[start]]).startswith(" "):
        start -= 1
    tail = materials.tokenizer.decode(context[start:], skip_special_tokens=False) + "\n\n"
    return context[:start] + materials.tokens(tail)


def lined(
    random: Random,
    materials: Materials,
    head: str,
    fixed: Sequence[str],
    draw: Callable[[], str],
    room: int,
) -> list[int]:
    """Lines of at most `room` tokens: the fixed ones, in their order, at random places among those that are drawn.

    head: what stands first; it ends with a line break.
    """
    start = materials.tokens(head)
    must = list(zip(fixed, materials.encode([f"{line}\n" for line in fixed]), strict=True))
    left = room - len(start) - sum(len(ids) for _, ids in must) - 2  # the last line ends otherwise
    drawn: list[tuple[str, list[int]]] = []
    while left > 0:
        each = sum(len(ids) for _, ids in drawn) / len(drawn) if drawn else 20.0
        texts = [draw() for _ in range(max(4, int(left / each) + 1))]
        different = list(dict.fromkeys(texts))
        ids = dict(zip(different, materials.encode([f"{text}\n" for text in different]), strict=True))
        for text in texts:
            left -= len(ids[text])
            if left < 0:
                break
            drawn.append((text, ids[text]))
    places = sorted(random.randrange(len(drawn) + 1) for _ in must)
    lines = list(drawn)
    for place, line in reversed(list(zip(places, must, strict=True))):
        lines.insert(place, line)
    if not lines:
        raise LongreachError(f"no line fits into {room} tokens")
    tokens = [*start, *chain.from_iterable(line for _, line in lines[:-1])]
    return tokens + materials.tokens(f"{lines[-1][0]}\n\n")
