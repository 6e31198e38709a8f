"""A sample as the tokens that a model is asked to go on with."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from longreach.adapters.transformers import chat, encode
from longreach.errors import InvalidInput
from longreach.tasks.base import Count, Given, GoesThrough, Sample, Task

DEFAULT = 20  # samples of a task that makes them
TRIES = 6


def counter(tokenizer: Any) -> Count:
    """Tokens of a text without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def cutter(tokenizer: Any) -> Callable[[str, int], str]:
    """Takes the middle out of a text: (text, keep) -> its first and last keep/2 tokens."""

    def cut(text: str, keep: int) -> str:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        ends = ids[: keep // 2], ids[len(ids) - (keep - keep // 2) :]
        return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)

    return cut


def prompt_tokens(tokenizer: Any, sample: Sample, in_chat: bool = True) -> list[int]:
    """Context and question, in the tokenizer's chat template where it has one, then the beginning of the answer.

    in_chat: False for texts that are gone on with as they are, whatever the tokenizer.
    """
    text = "\n\n".join(part for part in (sample.context, sample.question) if part)
    written = chat(tokenizer, text) if in_chat else None
    if written is not None:
        return encode(tokenizer, written + sample.begun, special=False)
    return encode(tokenizer, f"{text} {sample.begun}" if sample.begun else text)


def samples_of(task: Task, samples: int | None, limit: int | None) -> int:
    """How many samples a task is asked: all it holds, or DEFAULT, where `samples` does not say; `limit` at most."""
    most = len(task.fixed) if isinstance(task, Given) else samples or DEFAULT
    return min(most, samples or most, limit or most)


def fitted(task: Task, tokenizer: Any, length: int, seed: int, number: int, total: int) -> tuple[Sample, list[int]]:
    """Sample `number` of `total` of a task and its prompt, which leaves room for the answer in `length` tokens.

    Raises InvalidInput where the task cannot be built at this length.
    """
    room = length - task.max_new_tokens
    in_chat = task.chat if isinstance(task, Given) else True
    inside = room - len(prompt_tokens(tokenizer, Sample(".", "", "", ()), in_chat))
    for _ in range(TRIES):
        if isinstance(task, Given):
            sample = task.fit(task.fixed[number], inside, counter(tokenizer), cutter(tokenizer))
        else:
            chosen = task.at(number, total) if isinstance(task, GoesThrough) else task
            sample = chosen.sample(Random(f"{seed}/{task.name}/{number}"), inside, counter(tokenizer))
        prompt = prompt_tokens(tokenizer, sample, in_chat)
        if len(prompt) <= room:
            return sample, prompt
        inside -= len(prompt) - room  # joints between the parts take tokens of their own
    raise InvalidInput(
        f"{task.name}: no prompt of at most {room} tokens (length {length} less {task.max_new_tokens} for the answer) "
        f"in {TRIES} tries; ask for another --length"
    )
