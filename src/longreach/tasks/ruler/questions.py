"""Questions about one of many documents: SQuAD and HotpotQA files, or invented people (RULER, section 3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from longreach.errors import InvalidInput
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
    """items: what is asked. documents: all there are; those of other items are distractors."""

    name: str
    items: tuple[Item, ...]
    documents: tuple[str, ...]
    source: str = SOURCE

    max_new_tokens = 32

    def sample(self, random: Random, room: int, count: Count) -> Sample:
        """facts: the places of the documents that hold the answer, from 0 to 1."""
        item = random.choice(self.items)
        mine = set(item.documents)
        others = [d for d in self.documents if d not in mine]
        random.shuffle(others)
        question, seed = f"{ORDER}\n\nQuestion: {item.question}", random.getrandbits(64)

        def chosen(size: int) -> list[str]:
            documents = [*item.documents, *others[: size - 1]]
            Random(seed).shuffle(documents)
            return documents

        def text(size: int) -> str:
            return "\n\n".join([HEAD, *(f"Document {i}:\n{d}" for i, d in enumerate(chosen(size), 1))])

        left = room - count(f"\n\n{question} {BEGUN}")
        size = largest(lambda size: count(text(size)), left, self.name, most=1 + len(others))
        places = [i / len(chosen(size)) for i, d in enumerate(chosen(size)) if d in mine]
        return Sample(text(size), question, BEGUN, item.answers, {"depths": places, "documents": len(chosen(size))})

    def score(self, answer: str, sample: Sample) -> float:
        return any_of(answer, sample.answers)


def squad(path: Path, name: str = "qa_1") -> Questions:
    """SQuAD's JSON: answerable questions about Wikipedia's paragraphs. Raises InvalidInput, naming file and entry."""
    items: list[Item] = []
    documents: dict[str, None] = {}
    with _blaming(path):
        for article in _loaded(path)["data"]:
            for paragraph in article["paragraphs"]:
                documents[paragraph["context"]] = None
                for asked in paragraph["qas"]:
                    answers = tuple({answer["text"]: None for answer in asked["answers"]})
                    if answers and not asked.get("is_impossible"):
                        items.append(Item(asked["question"], answers, (paragraph["context"],)))
    return _made(path, name, items, documents, "RULER on SQuAD (Rajpurkar et al., 2016)")


def hotpot(path: Path, name: str = "qa_2") -> Questions:
    """HotpotQA's JSON: questions whose answer takes several of their documents. Raises as `squad`."""
    items: list[Item] = []
    documents: dict[str, None] = {}
    with _blaming(path):
        for entry in _loaded(path):
            texts = {title: f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]}
            documents |= dict.fromkeys(texts.values())
            needed = tuple(dict.fromkeys(texts[title] for title, _ in entry["supporting_facts"] if title in texts))
            items.append(Item(entry["question"], (entry["answer"],), needed or tuple(texts.values())))
    return _made(path, name, items, documents, "RULER on HotpotQA (Yang et al., 2018)")


def _loaded(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path given to --tasks") from error
    except ValueError as error:
        raise InvalidInput(f"{path} is no JSON ({error}); fetch it again") from error


class _blaming:
    """Within this block a field that is missing is the file's fault."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError):
            raise InvalidInput(f"{self.path}: an entry lacks the field {error}; is it the official file?") from error
        if isinstance(error, (TypeError, ValueError, AttributeError)):
            raise InvalidInput(f"{self.path} is not built like the official file ({error})") from error


def _made(path: Path, name: str, items: list[Item], documents: dict[str, None], source: str) -> Questions:
    if not items:
        raise InvalidInput(f"{path} holds no question with an answer")
    return Questions(name, tuple(items), tuple(documents), source)


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


TRADES = (
    "watchmaker baker surveyor glazier printer weaver botanist cellist carpenter pharmacist locksmith potter tailor "
    "beekeeper translator mason optician bookbinder brewer cartographer"
).split()
PERSON = "{name} was born in {year} and worked as a {trade} for many years. {name} lived in the town of {town}."
TOWN = "{town} is a town with an old market hall. It lies on the river {river}."
PEOPLE = 4000


def synthetic(hops: int) -> Questions:
    """Documents about invented people and towns. One hop: where somebody lived; two: on which river the town lies."""
    items, documents = list[Item](), list[str]()
    for person in people(hops, PEOPLE):
        about, place = PERSON.format(**person), TOWN.format(**person)
        documents += [about] if hops == 1 else [about, place]
        if hops == 1:
            items.append(Item(f"In which town did {person['name']} live?", (person["town"],), (about,)))
        else:
            asked = f"On which river lies the town in which {person['name']} lived?"
            items.append(Item(asked, (person["river"],), (about, place)))
    source = f"longreach: invented people, {hops} hop{'s' if hops > 1 else ''}, asked as in RULER's qa"
    return Questions(f"qa_synthetic_{hops}", tuple(items), tuple(documents), source)
