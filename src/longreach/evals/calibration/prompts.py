"""Prompts of a calibration: windows of texts, and prompts of tasks with their right answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longreach.adapters.transformers import chat, context_limit, encode
from longreach.errors import InvalidInput
from longreach.evals.perplexity import Text, read_text
from longreach.evals.progress import counted
from longreach.evals.prompting import Counter, PromptCutter, TokenParts, fitted_parts, whole
from longreach.tasks.base import Given, Sample, Task
from longreach.tasks.ruler.niah import Niah


@dataclass(frozen=True)
class Prompt:
    """name: of a task and number, or of a file and the window in it; the same for the same tokens.

    answer: how many of the last tokens are a task's right answer. chunks: [start, stop) of the documents' chunks, none
    where prompts are not cut.
    """

    name: str
    tokens: tuple[int, ...]
    answer: int = 0
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Prompts:
    """data: what they are, in words."""

    data: str
    prompts: tuple[Prompt, ...]

    @property
    def tokens(self) -> int:
        return sum(len(p.tokens) for p in self.prompts)

    @property
    def sha256(self) -> str:
        """sha256 of all tokens, as int64 in little-endian order, -1 after each prompt."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(np.asarray([*prompt.tokens, -1], dtype="<i8").tobytes())
        return digest.hexdigest()


def make(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Path | Text],
    tasks: Sequence[Task],
    *,
    length: int,
    count: int,
    least: int = 1,
    seed: int = 1,
    haystack: Path | None = None,
    made: Callable[[int], None] = lambda number: None,
    chunk_tokens: int | None = None,
) -> Prompts:
    """`count` windows of the texts together, and `count` prompts of each task, of (at most) `length` tokens each.

    least: tokens that a prompt must have to be of any use. seed: of the tasks' prompts; those of an evaluation with the
    same seed are the same. haystack: a text in which needles are hidden, in place of the one that evaluations use.
    made: called with the number of prompts newly made. chunk_tokens: tasks' prompts are cut into chunks of at most so
    many tokens, as `PromptCutter` does; None: each is tokenised as one text.
    Raises InvalidInput, with the number of tokens needed, if prompts are too short, texts hold too few, the model's
    context is exceeded, there is nothing to read, or a prompt that is to be cut has fewer than two chunks or no answer.
    """
    if not texts and not tasks:
        raise InvalidInput(f"nothing to calibrate on; give {'--text FILE, or ' if chunk_tokens is None else ''}--tasks")
    if count < 1:
        raise InvalidInput(f"prompts: expected at least 1, got {count}")
    if length < least:
        raise InvalidInput(
            f"prompts of {length} tokens are too short to be calibrated on: {least} tokens are needed; raise --length"
        )
    limit = context_limit(model)
    if limit is not None and length > limit:
        raise InvalidInput(f"--length: expected at most {limit} tokens, the model's context, got {length}; lower it")
    parts, prompts = list[str](), list[Prompt]()
    if texts:
        read = [one if isinstance(one, Text) else read_text(one, tokenizer) for one in texts]
        prompts += windows(read, encode(tokenizer, ""), length, count)
        parts.append(f"{counted(count, 'window')} of {', '.join(text.name for text in read)}")
        made(count)
    counter = Counter(tokenizer)
    cut = whole(tokenizer) if chunk_tokens is None else PromptCutter(tokenizer, chunk_tokens)
    for task in tasks:
        task = task if haystack is None else _hidden_in(task, haystack)
        for number in range(count):
            prompts.append(_asked(task, tokenizer, length, seed, number, count, counter, least, cut))
            made(1)
    if tasks:
        inside = "" if haystack is None else f", needles hidden in {haystack.name}"
        parts.append(f"{counted(count, 'prompt')} of each of {', '.join(t.name for t in tasks)}{inside}")
    return Prompts(f"{'; '.join(parts)}; {length} tokens each", tuple(prompts))


def windows(texts: Sequence[Text], begin: Sequence[int], length: int, count: int) -> list[Prompt]:
    """`count` windows of `length` tokens at even distances in the texts, each with the tokenizer's beginning of text.

    They do not overlap, and none reaches from one text into another.
    """
    room = length - len(begin)
    places = [(text, at) for text in texts for at in range(0, len(text.tokens) - room + 1, room)]
    if len(places) < count:
        held = " + ".join(str(len(text.tokens)) for text in texts)
        raise InvalidInput(
            f"{counted(count, 'prompt')} of {length} tokens are {count * room} tokens of text, and "
            f"{', '.join(text.name for text in texts)} hold {held}, enough for {len(places)}; give more --text, or ask "
            f"for fewer --prompts or a smaller --length"
        )
    chosen = [places[len(places) * i // count] for i in range(count)]
    return [
        Prompt(f"{text.name} {text.sha256[:12]} {at}", (*begin, *text.tokens[at : at + room])) for text, at in chosen
    ]


def _hidden_in(task: Task, haystack: Path) -> Task:
    return replace(task, essay=haystack) if isinstance(task, Niah) and task.haystack == "essay" else task


def _asked(
    task: Task, tokenizer: Any, length: int, seed: int, number: int, total: int, counter: Counter, least: int,
    cut: Callable[[Sample, bool], TokenParts],
) -> Prompt:  # fmt: skip
    """A prompt followed by its right answer: methods have to preserve how the model answers."""
    most = len(task.fixed) if isinstance(task, Given) else total
    if total > most:
        raise InvalidInput(f"{task.name} holds {most} samples, {total} requested; lower --prompts")
    sample, parts = fitted_parts(task, tokenizer, cut, length, seed, number, total, count=counter)
    joint = "" if sample.begun == "" and chat(tokenizer, ".") is not None else " "
    answer = tokenizer(joint + ", ".join(sample.answers), add_special_tokens=False, verbose=False).input_ids
    tokens = (*parts.ids, *answer)[:length]
    if len(tokens) < least:
        raise InvalidInput(
            f"{task.name}: a prompt of {len(tokens)} tokens is too short to be calibrated on: {least} are needed; "
            f"raise --length"
        )
    found = Prompt(f"{task.name} {number}", tokens, len(tokens) - len(parts.ids), parts.chunks)
    if isinstance(cut, PromptCutter) and (len(found.chunks) < 2 or not found.answer):
        raise InvalidInput(
            f"{task.name}: expected a prompt of at least two chunks and an answer of at least one token, got "
            f"{counted(len(found.chunks), 'chunk')} and {counted(found.answer, 'token')}; lower --chunk-tokens, raise "
            f"--length, or leave the task out"
        )
    return found
