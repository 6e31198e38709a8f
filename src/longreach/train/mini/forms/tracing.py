"""Chains of assignments, as RULER's variable tracking has them, and all that hold a value asked for."""

from __future__ import annotations

from random import Random

from longreach.tasks.ruler.text import NOISE
from longreach.tasks.ruler.tracing import ASKED, BEGUN, EXAMPLE_LINES, INTRO
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Exchange, Page, asked, lined, taken

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
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
        shown = _chain(random, hops, used)
        lines = _mixed(random, [NOISE] * EXAMPLE_LINES, _assignments(shown))
        exchange = _exchange(shown)
        head = "\n".join([INTRO, "", *lines]) + f"\n\n{exchange.question}{exchange.answer}\n\n{head}"
    random.shuffle(chains)
    pairs = asked(materials, [_exchange(chain) for chain in chains], room // 2)
    fixed = list[str]()
    for chain in chains:
        fixed = _mixed(random, fixed, _assignments(chain))
    return Page(lined(random, materials, head, fixed, lambda: NOISE, room - taken(pairs)), pairs)


def _chain(random: Random, hops: int, used: set[str]) -> Chain:
    fresh = list[str]()
    while len(fresh) <= hops:
        name = "".join(random.choice(LETTERS) for _ in range(5))
        if name not in used:
            used.add(name)
            fresh.append(name)
    value = str(random.randrange(10000, 100000))
    while value in used:
        value = str(random.randrange(10000, 100000))
    used.add(value)
    return value, fresh


def _assignments(chain: Chain) -> list[str]:
    value, names = chain
    return [f"VAR {name} = {of}" for name, of in zip(names, [value, *(f"VAR {name}" for name in names)])]


def _exchange(chain: Chain) -> Exchange:
    value, names = chain
    question = f"{ASKED} {BEGUN}".format(value=value, number=len(names))
    return Exchange(question, " " + " ".join(names))


def _mixed(random: Random, lines: list[str], more: list[str]) -> list[str]:
    """Both, each in its own order."""
    places = sorted(random.randrange(len(lines) + 1) for _ in more)
    mixed = list(lines)
    for place, line in reversed(list(zip(places, more, strict=True))):
        mixed.insert(place, line)
    return mixed
