"""Documents about invented people and towns, and questions about them."""

from __future__ import annotations

from random import Random

from longreach.tasks.ruler.invented import PERSON, TOWN, people
from longreach.tasks.ruler.questions import BEGUN, HEAD, ORDER
from longreach.train.mini.materials import Materials
from longreach.train.mini.page import Exchange, Page, asked

FIRST = 1_000_000  # the evaluation's people have the seeds 1 and 2
ASKED = (  # a question, what answers it, whether the town's document is needed
    ("In which town did {name} live?", "town", False),
    ("On which river lies the town in which {name} lived?", "river", True),
    ("When was {name} born?", "year", False),
    ("What did {name} work as?", "trade", False),
    ("On which river does {town} lie?", "river", True),
)


def questions(random: Random, room: int, materials: Materials) -> Page:
    """Numbered documents and several questions, some of which take two of the documents."""
    number = min(12, max(1, room // 160))
    towns = random.random() < 0.6
    shown, documents = list[dict[str, str]](), list[str]()
    left = room - 90 * number
    for person in people(random.randrange(FIRST, 1 << 60), max(3, room // 30)):
        mine = [PERSON.format(**person), *([TOWN.format(**person)] if towns else [])]
        left -= sum(len(ids) + 12 for ids in materials.encode(mine))
        if left < 0 and shown:
            break
        shown.append(person)
        documents += mine
    random.shuffle(documents)
    text = "\n\n".join([HEAD, *(f"Document {i}:\n{d}" for i, d in enumerate(documents, 1))])
    context = materials.tokens(f"{text}\n\n")
    about = [(question, field) for question, field, town in ASKED if towns or not town]
    exchanges = []
    for person in random.sample(shown, min(number, len(shown))):
        question, field = random.choice(about)
        asking = f"{ORDER}\n\nQuestion: {question.format(**person)} {BEGUN}"
        exchanges.append(Exchange(asking, f" {person[field]}"))
    return Page(context, asked(materials, exchanges, room - len(context)))
