"""Needle prompts with their right answer, and where in them tokens of the needle are."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from longreach.adapters.transformers import chat
from longreach.errors import InvalidInput, Unsupported
from longreach.evals.prompting import fitted
from longreach.tasks.base import Sample
from longreach.tasks.needle import NEEDLE
from longreach.tasks.registry import task
from longreach.tasks.ruler.niah import Niah

TASKS = ("niah_single_2", "niah_multikey_1")  # needles in real text: one, and one among four
LATE = 0.75  # rows of the text come from behind this share of it


@dataclass(frozen=True)
class Prompt:
    """tokens: up to where the right answer, of tokens `answer`, goes on. Positions count from 0.

    needle: the positions [start, stop) of the sentence that holds the answer; text: rows of the text that are looked
    at, ascending; facts: of the sample.
    """

    task: str
    number: int
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    needle: tuple[int, int]
    text: tuple[int, ...]
    facts: dict[str, Any]

    @property
    def rows(self) -> range:
        """The positions just before each token of the answer."""
        return range(len(self.tokens) - 1, len(self.tokens) - 1 + len(self.answer))


def make(name: str, tokenizer: Any, length: int, seed: int, number: int, total: int, rows: int) -> Prompt:
    """Sample `number` of `total` of a needle task in at most `length` tokens, `rows` positions of its text drawn.

    Raises InvalidInput if length or rows do not fit, Unsupported for a tokenizer without text offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise Unsupported(
            f"{type(tokenizer).__name__} gives no text offsets of its tokens, so needles cannot be located; save "
            f"the model with a fast tokenizer (tokenizer.json)"
        )
    niah = task(name)
    assert isinstance(niah, Niah)
    sample, _ = fitted(niah, tokenizer, length, seed, number, total)
    (value,), (key,) = sample.answers, sample.facts["keys"]
    text, special = _text(tokenizer, sample)
    found = tokenizer(f"{text} {value}", add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids, places = list(found.input_ids), [(int(a), int(b)) for a, b in found.offset_mapping]
    reaching = [n for n, (_, stop) in enumerate(places) if stop > len(text) + 1]  # beyond the space before the answer
    first, last = reaching[0], reaching[-1]
    sentence = NEEDLE.format(attribute=niah.value, key=key, value=value)
    begin, question = text.index(sentence), text.rindex(sample.question)
    inside = [n for n, (start, stop) in enumerate(places[:first]) if start < begin + len(sentence) and stop > begin]
    end = next(n for n, (_, stop) in enumerate(places) if stop > question)
    late = range(max(1, int(LATE * end)), end)
    if rows > len(late):
        raise InvalidInput(
            f"rows: expected at most {len(late)}, the last quarter of the text, got {rows}; lower --rows"
        )
    drawn = Random(f"{seed}/{name}/{number}/rows").sample(late, rows)
    return Prompt(name, number, tuple(ids[:first]), tuple(ids[first : last + 1]), (inside[0], inside[-1] + 1),
                  tuple(sorted(drawn)), dict(sample.facts))  # fmt: skip


def _text(tokenizer: Any, sample: Sample) -> tuple[str, bool]:
    """A sample as the model is asked it, up to the answer, and whether special tokens are still to be put to it."""
    turn = f"{sample.context}{sample.joint}{sample.question}"
    written = chat(tokenizer, turn)
    return (f"{turn} {sample.begun}", True) if written is None else (f"{written}{sample.begun}", False)
