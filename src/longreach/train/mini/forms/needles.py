"""Facts hidden in real text, among their like, or in five sentences again and again; many questions about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from uuid import UUID

from longreach.tasks.needle import INTRO, INTRO_ALL, digits
from longreach.tasks.ruler.text import NOISE, enumeration
from longreach.train.mini.forms import wordings
from longreach.train.mini.forms.wordings import Wording
from longreach.train.mini.keys import KeySource
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Exchange, Page, asked, hidden, lined, taken


@dataclass(frozen=True)
class Fact:
    """A key, its values in the order in which the text has them, and how they are worded."""

    key: str
    values: tuple[str, ...]
    wording: Wording

    @property
    def statements(self) -> list[str]:
        return [self.wording.state(self.key, value) for value in self.values]


def uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))


def ruler_keys(random: Random, source: KeySource, count: int) -> Callable[[], str]:
    """A source of keys as RULER has them: pairs of words, or UUIDs; of all kinds, a few alike, one time in five."""
    kind = random.random()
    if kind < 0.6:
        return lambda: source.pair(random).replace(" ", random.choice(" -"))
    if kind < 0.8:
        return lambda: uuid(random)
    keys = iter(source.distinct(random, count))
    return lambda: next(keys)


def ruler_values(random: Random, source: KeySource) -> tuple[str, Callable[[], str]]:
    """A kind of value as RULER names it, and a source of such values."""
    kind = random.random()
    if kind < 0.6:
        return "number", lambda: digits(random, 7)
    if kind < 0.9:
        return "uuid", lambda: uuid(random)
    return "word", lambda: source.pair(random)


def counts(random: Random, count: int) -> list[int]:
    """How many values each key has: one, or, in a quarter of the texts, several for half of the keys."""
    if random.random() < 0.75:
        return [1] * count
    return [random.choice((1, 2, 3, 4, 4, 5)) for _ in range(count)]


def draw_facts(random: Random, source: KeySource, count: int) -> tuple[str, list[Fact]]:
    """An introduction (or none) and facts of which no value occurs twice, no key within another."""
    style = random.random()
    intro, values = "", set[str]()
    if style < 0.55:
        attribute, value = ruler_values(random, source)
        key = ruler_keys(random, source, count)
        common = wordings.ruler(attribute)
        if random.random() < 0.8:
            intro = random.choice((INTRO, INTRO_ALL)).format(attribute=attribute)
    else:
        keys = iter(source.distinct(random, count))
        common = wordings.terse(random) if style < 0.7 else wordings.plain(random)

        def key() -> str:
            return next(keys)

        def value() -> str:
            return source.value(random)

    several = style < 0.85  # else every fact is worded in its own way, and has one value
    facts: dict[str, Fact] = {}
    for number in counts(random, count) if several else [1] * count:
        name = key()
        while name in facts:
            name = key()
        mine: list[str] = []
        while len(mine) < number:
            drawn = value()
            if drawn not in values and drawn not in name:
                values.add(drawn)
                mine.append(drawn)
        facts[name] = Fact(name, tuple(mine), common if several else wordings.plain(random))
    return intro, list(facts.values())


def exchanges(random: Random, facts: list[Fact]) -> list[Exchange]:
    """A question about each fact, in random order; some ask about two to five of one wording together."""
    order = list(facts)
    random.shuffle(order)
    found = []
    together = 0.35 if random.random() < 0.4 else 0.0
    while order:
        group = [order.pop()]
        if random.random() < together:
            more = random.randrange(1, 5)
            group += [fact for fact in order[-more:] if fact.wording == group[0].wording]
            order = [fact for fact in order if fact not in group]
        values = [value for fact in group for value in fact.values]
        question = group[0].wording.ask(enumeration([fact.key for fact in group]), len(values) > 1)
        found.append(Exchange(question, f" {enumeration(values)}"))
    return found


def order(random: Random, facts: list[Fact]) -> list[str]:
    """All statements, shuffled, those of one fact in the order of its values."""
    places = [number for number, fact in enumerate(facts) for _ in fact.values]
    random.shuffle(places)
    left = [iter(fact.statements) for fact in facts]
    return [next(left[place]) for place in places]


def fitting(materials: Materials, facts: list[Fact], room: int) -> list[Fact]:
    """The first facts whose statements and questions fit the room; at least one, if need be with one value."""
    kept: list[Fact] = []
    for fact in facts:
        asking = fact.wording.ask(fact.key, len(fact.values) > 1) + enumeration(fact.values)
        room -= sum(map(len, materials.encode([*fact.statements, asking]))) + 4 * len(fact.values) + 6
        if room < 0:
            return kept or [replace(fact, values=fact.values[:1])]
        kept.append(fact)
    return kept


def _some(random: Random, room: int) -> int:
    """How many facts: up to one in 40 tokens and 32; one or two in a tenth of the texts."""
    most = min(32, max(2, room // 40))
    return random.randrange(1, 3) if random.random() < 0.1 else random.randrange(max(2, most // 3), most + 1)


def essay(random: Random, room: int, materials: Materials) -> Page:
    """Facts at ends of sentences of real text."""
    intro, facts = draw_facts(random, materials.keys, _some(random, room))
    facts = fitting(materials, facts, room * 3 // 4 - 50)
    pairs = asked(materials, exchanges(random, facts), room)
    filler = materials.filler(random, prose=0.9)
    return Page(hidden(random, materials, filler, order(random, facts), room - taken(pairs), intro), pairs)


def noise(random: Random, room: int, materials: Materials) -> Page:
    """Facts between the same five sentences again and again."""
    intro, facts = draw_facts(random, materials.keys, _some(random, room))
    facts = fitting(materials, facts, room * 3 // 4 - 50)
    pairs = asked(materials, exchanges(random, facts), room)
    head = f"{intro}\n" if intro else ""
    return Page(lined(random, materials, head, order(random, facts), lambda: NOISE, room - taken(pairs)), pairs)


def alike(random: Random, room: int, materials: Materials) -> Page:
    """Facts among others of the same kind, line by line, and nothing else."""
    attribute, value = ruler_values(random, materials.keys)
    kind = random.random()
    if kind < 0.45:  # RULER's multikey_3
        attribute, value = "uuid", lambda: uuid(random)
    same = kind < 0.35 or random.random() < 0.2
    common = wordings.ruler(attribute) if random.random() < 0.75 else wordings.terse(random)
    names, joint = set[str](), random.choice("- -")

    def key() -> str:
        name = next(iter(names), "")
        while name in names or not name:
            name = uuid(random) if same else materials.keys.pair(random).replace(" ", joint)
        names.add(name)
        return name

    number = random.randrange(1, min(32, max(3, room // 100)) + 1)
    facts = [Fact(key(), tuple(value() for _ in range(n)), common) for n in counts(random, number)]
    facts = fitting(materials, facts, room * 2 // 3)
    pairs = asked(materials, exchanges(random, facts), room)
    intro = random.choice((INTRO, INTRO_ALL)).format(attribute=attribute)
    head = f"{intro}\n" if random.random() < 0.8 else ""
    return Page(
        lined(random, materials, head, order(random, facts), lambda: common.state(key(), value()), room - taken(pairs)),
        pairs,
    )
