"""A plan hidden in real text, to be written out item by item."""

from __future__ import annotations

from random import Random

from longreach.tasks.plan import ASKED, BEGUN, INTRO
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Exchange, Page, asked, hidden, taken

SENTENCES = (
    "This is item {number} of the plan.",
    "The {word} is number {number}.",
    "It comes right after the one before.",
    "Here the plan asks for the {word}.",
)


def plan(random: Random, room: int, materials: Materials) -> Page:
    """Each item's number and word, with a sentence about it or without."""
    items = 20 if room > 1200 and random.random() < 0.6 else random.randrange(3, 26 if room > 1200 else 10)
    words = random.sample(materials.words, items)
    plan = " ".join([INTRO.format(items=items), *(f"{i}. {w}." for i, w in enumerate(words, 1))])
    sentence = random.choice(SENTENCES) if random.random() < 0.8 else ""
    lines = [f"{i}. {w}. {sentence.format(number=i, word=w)}".rstrip() for i, w in enumerate(words, 1)]
    begun = BEGUN.format(first=words[0])
    question = f"{ASKED.format(items=items)} {begun}"
    pairs = asked(materials, [Exchange(question, "\n".join(lines).removeprefix(begun))], room * 2 // 3)
    filler = materials.filler(random, prose=0.95)
    return Page(hidden(random, materials, filler, [plan], room - taken(pairs)), pairs)
