"""Questions about one of many documents, the others there to distract (RULER, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from longreach.tasks.base import Count, Sample, any_of
from longreach.tasks.ruler.text import SOURCE
from longreach.tasks.sizing import largest

ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
HEAD = f"{ORDER}\n\nThe following are given documents."
BEGUN = "Answer:"


@dataclass(frozen=True)
class Item:
    """A question, its answers, and the documents that they stand in."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Questions:
    """items: what is asked. documents: all there are; those of other items are distractors.

    sole: whether documents that happen to hold an answer are left out, so that only the item's own do.
    item: the place of the one that is asked; None for any.
    """

    name: str
    items: tuple[Item, ...]
    documents: tuple[str, ...]
    source: str = SOURCE
    sole: bool = False
    item: int | None = None

    max_new_tokens = 32

    def at(self, number: int, total: int, seed: int) -> Questions:
        """The task of sample `number`: no item comes again before all were asked; the order is the seed's affair."""
        order = list(range(len(self.items)))
        Random(f"{seed}/{self.name}").shuffle(order)
        return replace(self, item=order[number % len(order)])

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        """facts: the places of the documents that hold the answer, from 0 to 1; which item is asked."""
        place = random.randrange(len(self.items)) if self.item is None else self.item
        item = self.items[place]
        mine = set(item.documents)
        others = [d for d in self.documents if d not in mine]
        random.shuffle(others)
        if self.sole:
            others = [d for d in others if not any_of(d, item.answers)]
        question, seed = f"{ORDER}\n\nQuestion: {item.question}", random.getrandbits(64)

        def chosen(size: int) -> list[str]:
            documents = [*item.documents, *others[: size - 1]]
            Random(seed).shuffle(documents)
            return documents

        def text(size: int) -> str:
            return "\n\n".join([HEAD, *(f"Document {i}:\n{d}" for i, d in enumerate(chosen(size), 1))])

        beside = count(f"\n\n{question} {BEGUN}")
        most = 1 + len(others)
        size = largest(lambda size: count(text(size)), room - beside, self.name, most=most, beside=beside)
        documents = chosen(size)
        places = [i / len(documents) for i, d in enumerate(documents) if d in mine]
        facts = {"depths": places, "documents": len(documents), "item": place}
        return Sample(text(size), question, BEGUN, item.answers, facts, len(HEAD))

    def score(self, answer: str, sample: Sample) -> float:
        return any_of(answer, sample.answers)
