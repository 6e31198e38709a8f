"""A sample as the tokens that a model is asked to go on with."""

from __future__ import annotations

from random import Random
from typing import Any

from longreach.adapters.transformers import chat, encode
from longreach.errors import InvalidInput
from longreach.tasks.base import Count, Sample, Task

TRIES = 6


def counter(tokenizer: Any) -> Count:
    """Tokens of a text without special ones."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def prompt_tokens(tokenizer: Any, sample: Sample) -> list[int]:
    """Context and question, in the tokenizer's chat template where it has one, then the beginning of the answer."""
    text = "\n\n".join(part for part in (sample.context, sample.question) if part)
    written = chat(tokenizer, text)
    if written is not None:
        return encode(tokenizer, written + sample.begun, special=False)
    return encode(tokenizer, f"{text} {sample.begun}" if sample.begun else text)


def fitted(task: Task, tokenizer: Any, length: int, seed: int, number: int) -> tuple[Sample, list[int]]:
    """Sample `number` of a task and its prompt, which leaves room for the answer in `length` tokens.

    Raises InvalidInput where the task cannot be built at this length.
    """
    room = length - task.max_new_tokens
    inside = room - len(prompt_tokens(tokenizer, Sample(".", "", "", ())))
    for _ in range(TRIES):
        sample = task.sample(Random(f"{seed}/{task.name}/{number}"), inside, counter(tokenizer))
        prompt = prompt_tokens(tokenizer, sample)
        if len(prompt) <= room:
            return sample, prompt
        inside -= len(prompt) - room  # joints between the parts take tokens of their own
    raise InvalidInput(
        f"{task.name}: no prompt of at most {room} tokens (length {length} less {task.max_new_tokens} for the answer) "
        f"in {TRIES} tries; ask for another --length"
    )
