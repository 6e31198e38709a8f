"""Chains of assignments, as RULER's variable tracking has them, and all that hold a value asked for."""

from __future__ import annotations

from random import Random

from longreach.tasks.ruler.text import NOISE
from longreach.tasks.ruler.tracing import ASKED, BEGUN, EXAMPLE_LETTERS, EXAMPLE_LINES, INTRO, LETTERS, names
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Exchange, Page, asked, lined, taken

Chain = tuple[str, list[str]]  # the value, and the names that come to hold it


def tracing(random: Random, room: int, materials: Materials) -> Page:
    """One chain in most texts, up to four in others, a worked example before most; each chain is asked about."""
    short = room < 800
    hops = 4 if random.random() < 0.7 else random.randrange(1, 4 if short else 7)
    number = 1 if random.random() < 0.5 else 2 if short else random.randrange(1, min(4, room // 500) + 1)
    used: set[str] = set()
    chains = [_chain(random, hops, used) for _ in range(number)]
    head = f"{INTRO}\n\n"
    if random.random() < 0.8 and not short:
        shown = _chain(random, hops, used, EXAMPLE_LETTERS if random.random() < 0.7 else LETTERS)
        lines = _mixed(random, [NOISE] * EXAMPLE_LINES, _assignments(shown))
        exchange = _exchange(shown)
        head = "\n".join([INTRO, "", *lines]) + f"\n\n{exchange.question}{exchange.answer}\n\n{head}"
    random.shuffle(chains)
    pairs = asked(materials, [_exchange(chain) for chain in chains], room // 2)
    fixed = list[str]()
    for chain in chains:
        fixed = _mixed(random, fixed, _assignments(chain))
    return Page(lined(random, materials, head, fixed, lambda: NOISE, room - taken(pairs)), pairs)


def _chain(random: Random, hops: int, used: set[str], letters: int = LETTERS) -> Chain:
    fresh = names(random, hops + 1, letters)
    while used.intersection(fresh):
        fresh = names(random, hops + 1, letters)
    value = str(random.randrange(10000, 100000))
    while value in used:
        value = str(random.randrange(10000, 100000))
    used.update(fresh, [value])
    return value, fresh


def _assignments(chain: Chain) -> list[str]:
    value, held = chain
    return [f"VAR {name} = {of}" for name, of in zip(held, [value, *(f"VAR {name}" for name in held)])]


def _exchange(chain: Chain) -> Exchange:
    value, held = chain
    question = f"{ASKED} {BEGUN}".format(value=value, number=len(held))
    return Exchange(question, " " + " ".join(held))


def _mixed(random: Random, lines: list[str], more: list[str]) -> list[str]:
    """Both, each in its own order."""
    places = sorted(random.randrange(len(lines) + 1) for _ in more)
    mixed = list(lines)
    for place, line in reversed(list(zip(places, more, strict=True))):
        mixed.insert(place, line)
    return mixed
