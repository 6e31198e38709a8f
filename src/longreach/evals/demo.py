"""Facts hidden in real text, asked of the shipped model with each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from longreach.adapters.transformers import Answer, Reader, attach, load, share, stop_tokens
from longreach.methods.registry import names
from longreach.tasks import haystack
from longreach.tasks.needle import INTRO, KeySource, Needle, evaluation_episode

DEPTHS = (0.1, 0.5, 0.9)
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Row:
    """One question asked with one method. Fractions are of the bytes that dense attention reads."""

    prefill: str
    decode: str
    depth: float
    key: str
    expected: str
    answer: str
    right: bool
    prefill_fraction: float
    decode_fraction: float | None
    read_seconds: float
    first_token_seconds: float
    seconds_per_token: float | None


@dataclass(frozen=True)
class Setting:
    """What the demo runs on."""

    model: str
    tokens: int
    characters: int
    depths: tuple[float, ...] = DEPTHS


class Demo:
    """The document, its facts and the model; `rows` asks."""

    def __init__(self, length: int = 4096, seed: int = 0, device: str = "cpu"):
        self.model, self.tokenizer = load("mini", device=device)
        random, source = Random(f"demo/{seed}"), KeySource(True)
        self.facts: list[Needle] = [evaluation_episode(random, source).needles[0] for _ in DEPTHS]

        def count(text: str) -> int:
            return len(self.tokenizer(text).input_ids)

        room = length - ANSWER_TOKENS - max(count("\n\n" + f.question) for f in self.facts)
        placed = [(depth, fact.statement) for depth, fact in zip(DEPTHS, self.facts, strict=True)]
        text = haystack.document(random, placed, room, count, INTRO.format(attribute="number"))
        prompts = [self.tokenizer(f"{text}\n\n{f.question}").input_ids for f in self.facts]
        other = self.tokenizer(f"{text}\n\nWhy?").input_ids
        self.document, self.questions = share(prompts, other)
        self.setting = Setting("longreach-mini", max(map(len, prompts)), len(text))

    def combinations(self) -> list[tuple[str, tuple[str, ...]]]:
        """(prefill method, decode methods that share its reading of the document)."""
        plans = [("dense", names("decode"))]
        return plans + [(name, (name,)) for name in names("prefill") if name != "dense"]

    def rows(self, progress: Callable[[int], None] = lambda n: None) -> Iterator[Row]:
        """Ask every question with every method; the document is read once per prefill method."""
        stop = stop_tokens(self.model, self.tokenizer)
        for prefill, decodes in self.combinations():
            with attach(self.model, prefill=prefill) as session:
                reader = Reader(session)
                reader.read(self.document, progress)
                prefill_fraction = session.report().fraction("prefill") or 0.0
                for decode in decodes:
                    for depth, fact, question in zip(DEPTHS, self.facts, self.questions, strict=True):
                        session.switch(decode)
                        answer = Answer()
                        list(reader.ask(question, ANSWER_TOKENS, stop, answer))
                        said = self.tokenizer.decode(answer.tokens).strip()
                        yield Row(
                            prefill, decode, depth, fact.key, fact.value, said, fact.value in said, prefill_fraction,
                            session.report().fraction("decode"), reader.read_seconds, answer.first_token_seconds,
                            answer.seconds_per_token,
                        )  # fmt: skip
