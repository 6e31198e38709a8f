"""A sample as the tokens that a model is asked to go on with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from longreach.adapters.transformers import Splitter, chat, encode, frame
from longreach.adapters.transformers.control_tokens import Part
from longreach.adapters.transformers.prompt_tokens import encode_parts
from longreach.errors import InvalidInput
from longreach.tasks.base import Count, Given, GoesThrough, Sample, Task

DEFAULT = 20  # samples of a task that makes them
TRIES = 6
SHORT, MOST_KNOWN = 4096, 20_000  # characters of a text whose tokens are remembered, and how many such texts


@dataclass(frozen=True)
class PromptSample:
    """One prompt, made once."""

    number: int
    sample: Sample
    prompt: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()  # [start, stop) of the documents' chunks, if prompts are cut
    question_tokens: int | None = None  # the prompt's last tokens, those after the context; None where not counted

    def to_json(self) -> dict[str, Any]:
        text = [self.sample.context, self.sample.question, self.sample.begun]
        return {
            "number": self.number,
            "tokens": len(self.prompt),
            "characters": sum(map(len, text)),
            "expected": list(self.sample.answers),
            "facts": dict(self.sample.facts),
            **({"chunks": [list(chunk) for chunk in self.chunks]} if self.chunks else {}),
            **({} if self.question_tokens is None else {"question_tokens": self.question_tokens}),
        }


class Counter:
    """Tokens of a text without special ones. Those of short texts are remembered: haystacks share their paragraphs."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._known = tokenizer, dict[str, int]()

    def __call__(self, text: str) -> int:
        if text in self._known:
            return self._known[text]
        tokens = self._tokens(text)
        if len(text) <= SHORT and len(self._known) < MOST_KNOWN:
            self._known[text] = tokens
        return tokens

    def _tokens(self, text: str) -> int:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            return len(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if not self._known:  # a call of the whole tokenizer switches the backend's truncation and padding off
            self._tokenizer("", add_special_tokens=False, verbose=False)
        return len(backend.encode_batch_fast([text], add_special_tokens=False)[0])  # faster: no offsets


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
    text = sample.joint.join(part for part in (sample.context, sample.question) if part)
    written = chat(tokenizer, text) if in_chat else None
    if written is not None:
        return encode(tokenizer, written + sample.begun, special=False)
    return encode(tokenizer, f"{text} {sample.begun}" if sample.begun else text)


class TokenParts(NamedTuple):
    """A prompt's tokens, and [start, stop) of the chunks of its documents; none if it is tokenised as one text.

    question: number of tokens after the context: question, rest of the chat template, beginning of the answer.
    """

    ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()
    question: int | None = None


class PromptCutter:
    """Prompts tokenised in parts: instructions, documents, question; the documents are cut into chunks.

    Special tokens, a chat template and instructions stand before the first chunk, the question after the last. A chunk
    has `most` tokens at most and ends with a document, paragraph or sentence where it can, or anywhere (`Splitter`).
    Raises as `frame` and `Splitter`.
    """

    def __init__(self, tokenizer: Any, most: int, *, anywhere: bool = False):
        self._tokenizer, self._frame = tokenizer, frame(tokenizer)
        self._splitter = Splitter(tokenizer, most, anywhere=anywhere)

    def __call__(self, sample: Sample, in_chat: bool = True) -> TokenParts:
        """The parts of a sample's prompt. Raises InvalidInput if no question follows the documents."""
        templated = in_chat and self._frame.templated
        documents = sample.context[sample.instructions :].lstrip()
        before = sample.context[: len(sample.context) - len(documents)]
        asked = f"{sample.joint}{sample.question}" if sample.question else ""
        if templated:
            head = [*self._frame.head, Part(before, True)]
            tail = [Part(asked, True), Part(self._frame.rest, False), Part(sample.begun, True)]
        else:
            head, tail = [Part(before, True)], [Part(asked + (f" {sample.begun}" if sample.begun else ""), True)]
        if not any(part.text for part in tail):
            raise InvalidInput(
                "this task's text contains its question, so nothing follows its documents; leave the task out"
            )
        ids, chunks = encode_parts(self._tokenizer, head, special=not templated), list[tuple[int, int]]()
        for piece in self._splitter.split(documents).chunks:
            chunks.append((len(ids), len(ids) + len(piece.tokens)))
            ids += piece.tokens
        after = encode_parts(self._tokenizer, tail, special=False)
        return TokenParts((*ids, *after), tuple(chunks), len(after))


def question_tokens(tokenizer: Any, sample: Sample, parts: TokenParts, in_chat: bool = True) -> int:
    """Number of a prompt's tokens after the context. In one text they begin where the context alone goes on otherwise.

    Raises InvalidInput if no question follows the context.
    """
    if parts.question is not None:
        return parts.question
    if not sample.question:
        raise InvalidInput(
            "this task's text contains its question, so that it cannot be read apart; leave the task out"
        )
    context = prompt_tokens(tokenizer, replace(sample, question="", begun=""), in_chat)
    pairs = enumerate(zip(parts.ids, context, strict=False))
    return len(parts.ids) - next((at for at, (one, other) in pairs if one != other), min(len(parts.ids), len(context)))


def samples_of(task: Task, samples: int | None, limit: int | None) -> int:
    """Number of samples of a task: `samples`, else all it holds or DEFAULT, and at most `limit`."""
    most = len(task.fixed) if isinstance(task, Given) else samples or DEFAULT
    return min(most, samples or most, limit or most)


@dataclass(frozen=True)
class AtLength:
    """A task, and the tokens of prompt and answer that it is asked with."""

    task: Task
    length: int


def at_lengths(tasks: Iterable[Task], lengths: Sequence[int]) -> dict[str, AtLength]:
    """Each task at each length, by its name, "NAME@LENGTH" where there are several lengths."""
    found = [AtLength(task, length) for length in lengths for task in tasks]
    return {f"{t.task.name}@{t.length}" if len(lengths) > 1 else t.task.name: t for t in found}


class Maker:
    """Makes the prompts of tasks, by name and number; the same in any process and order.

    chunk_tokens: of a document's chunk at most, where prompts are to be cut (`PromptCutter`); None where they are not.
    anywhere: chunks end where they are full, not with sentences. question: count the tokens of questions.
    """

    def __init__(
        self, tasks: Mapping[str, AtLength], tokenizer: Any, seed: int, chunk_tokens: int | None = None,
        *, anywhere: bool = False, question: bool = False,
    ):  # fmt: skip
        self.tasks = dict(tasks)
        self._tokenizer, self._count, self._seed = tokenizer, Counter(tokenizer), seed
        self._cut = None if chunk_tokens is None else PromptCutter(tokenizer, chunk_tokens, anywhere=anywhere)
        self._question = question

    def make(self, name: str, number: int, total: int) -> PromptSample:
        """Prompt `number` of `total` of a task. Raises as `fitted`."""
        one = self.tasks[name]
        cut = self._cut or whole(self._tokenizer)
        sample, parts = fitted_parts(
            one.task, self._tokenizer, cut, one.length, self._seed, number, total, count=self._count
        )
        question = None
        if self._question:
            in_chat = one.task.chat if isinstance(one.task, Given) else True
            question = question_tokens(self._tokenizer, sample, parts, in_chat)
        return PromptSample(number, sample, parts.ids, parts.chunks, question)


def whole(tokenizer: Any) -> Callable[[Sample, bool], TokenParts]:
    """Tokenises prompts as one text."""
    return lambda sample, in_chat: TokenParts(tuple(prompt_tokens(tokenizer, sample, in_chat)))


def fitted(
    task: Task, tokenizer: Any, length: int, seed: int, number: int, total: int, *, count: Count | None = None
) -> tuple[Sample, list[int]]:
    """Sample `number` of `total` of a task and its prompt, which leaves room for the answer in `length` tokens.

    count: the tokenizer's Counter, where one is kept from sample to sample.
    Raises InvalidInput where the task cannot be built at this length.
    """
    sample, parts = fitted_parts(task, tokenizer, whole(tokenizer), length, seed, number, total, count=count)
    return sample, list(parts.ids)


def fitted_parts(
    task: Task, tokenizer: Any, tokens: Callable[[Sample, bool], TokenParts], length: int, seed: int, number: int,
    total: int, *, count: Count | None = None,
) -> tuple[Sample, TokenParts]:  # fmt: skip
    """As `fitted`, with prompts tokenised by `tokens`, given a sample and whether it stands in the chat template."""
    count = count or Counter(tokenizer)
    room = length - task.max_new_tokens
    in_chat = task.chat if isinstance(task, Given) else True
    inside = room - len(prompt_tokens(tokenizer, Sample(".", "", "", ()), in_chat))
    for _ in range(TRIES):
        if isinstance(task, Given):
            sample = task.fit(task.fixed[number], inside, count, cutter(tokenizer))
        else:
            chosen = task.at(number, total, seed) if isinstance(task, GoesThrough) else task
            sample = chosen.sample(Random(f"{seed}/{task.name}/{number}"), inside, count)
        prompt = tokens(sample, in_chat)
        if len(prompt.ids) <= room:
            return sample, prompt
        inside -= len(prompt.ids) - room  # joints between the parts take tokens of their own
    raise InvalidInput(
        f"{task.name}: no prompt of at most {room} tokens (length {length} less {task.max_new_tokens} for the answer) "
        f"in {TRIES} tries; ask for another --length"
    )
