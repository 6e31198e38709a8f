"""Questions about invented people and towns, where no data set is given: qa_synthetic_1 and qa_synthetic_2."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from longreach.tasks.ruler.questions import Item, Questions

TRADES = (
    "watchmaker baker surveyor glazier printer weaver botanist cellist carpenter pharmacist locksmith potter tailor "
    "beekeeper translator mason optician bookbinder brewer cartographer"
).split()
PERSON = "{name} was born in {year} and worked as a {trade} for many years. {name} lived in the town of {town}."
TOWN = "{town} is a town with an old market hall. It lies on the river {river}."
PEOPLE = 4000


def questions(name: str) -> Questions:
    """qa_synthetic_1 asks where somebody lived, qa_synthetic_2 on which river the town lies in which they lived."""
    hops = int(name.rpartition("_")[2])
    items, documents = list[Item](), list[str]()
    for person in people(hops, PEOPLE):
        about, place = PERSON.format(**person), TOWN.format(**person)
        if hops == 1:
            documents.append(about)
            items.append(Item(f"In which town did {person['name']} live?", (person["town"],), (about,)))
        else:
            documents += [about, place]
            asked = f"On which river lies the town in which {person['name']} lived?"
            items.append(Item(asked, (person["river"],), (about, place)))
    source = f"longreach: invented people, {hops} hop{'s' if hops > 1 else ''}, asked as in RULER's qa"
    return Questions(name, tuple(items), tuple(documents), source, sole=True)


def people(seed: int, number: int) -> Iterator[dict[str, str]]:
    """Invented people, each with a name, a town, the town's river, a trade and a number."""
    random = Random(f"people/{seed}")
    used: set[str] = set()

    def word(ends: str) -> str:
        while True:
            made = "".join(
                random.choice("bdfgklmnprstvz") + random.choice("aeiou") for _ in range(random.choice((2, 3)))
            )
            made = made.capitalize() + random.choice(ends.split())
            if made not in used:
                used.add(made)
                return made

    for _ in range(number):
        yield {
            "name": f"{word('n l r')} {word('son sen ski man dal')}",
            "town": word("burg ville ton field mouth"),
            "river": word("a o e"),
            "trade": random.choice(TRADES),
            "year": str(random.randrange(1850, 1990)),
        }
