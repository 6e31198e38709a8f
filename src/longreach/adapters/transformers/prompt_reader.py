"""Read a document once, ask it several questions: prefill, greedy decoding and its timing on an attached model."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.checks import text_config
from longreach.adapters.transformers.loop.decoder import vocabulary_of
from longreach.adapters.transformers.loop.run import Choose, DecodeRun, now
from longreach.adapters.transformers.loop.sampling import Ends, greedy
from longreach.adapters.transformers.oom import memory_errors
from longreach.errors import InvalidInput, ModelFileError, OutOfMemory, Unsupported
from longreach.methods.base import AttentionMethod

CHUNK = 512  # prompt tokens per pass: short enough for a progress bar to move
ROWS = 64  # of logits that are made fp32 at a time
Advance = Callable[[int], None]  # told how many more units of work are done


def _ignore(done: int) -> None:
    """Progress that nobody watches."""


@dataclass
class Answer:
    """One answer as it comes: tokens without the stop token; seconds are wall-clock, waiting for the device.

    stopped: it ended with a stop token, not because max_new_tokens was reached. setup_seconds: the first steps of a
    captured loop, compiling and capturing included; decode_seconds: the other `steps` of the model (see
    `loop.DecodeRun`).
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    first_token_seconds: float = 0.0
    setup_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a decode step past the setup's; None before there was one."""
        return self.decode_seconds / self.steps if self.steps else None


class Reader:
    """A document in the KV cache of a session; every question starts from it and leaves it as it was.

    chunk: prompt tokens per pass. graph: whether decode steps are captured in a CUDA graph, as in `generate`.
    """

    def __init__(self, session: Session, chunk: int = CHUNK, *, graph: bool | None = None):
        if chunk < 1:
            raise InvalidInput(f"prefill chunk: expected at least 1 token, got {chunk}")
        self.session, self.chunk, self.graph = session, chunk, graph
        self.cache = session.new_cache(1)
        self.read_seconds = 0.0

    def read(self, tokens: Sequence[int], progress: Advance = _ignore, *, then: int = 0) -> Tensor:
        """Put the document into the cache; logits [V] after it. progress is told how many tokens each pass read.

        then: tokens that the longest question and answer will take; the cache makes room for them at once.
        """
        started = now(self.session.model)
        logits = self._pass(tokens, progress, then)
        self.read_seconds += now(self.session.model) - started
        return logits

    def score(self, tokens: Sequence[int], progress: Advance = _ignore) -> Tensor:
        """Read tokens into the empty cache; -log p of each but the first given those before it, fp32 [T - 1], in nats.

        Logits of a chunk are turned into numbers a few rows at a time: [chunk, V] is never held in fp32.
        """
        if self.cache.columns:
            raise InvalidInput(f"score reads a text from its beginning, the cache holds {self.cache.columns} tokens")
        if len(tokens) < 2:
            raise InvalidInput(f"expected at least two tokens, got {len(tokens)}")
        started, found = now(self.session.model), list[Tensor]()
        with memory_errors(), self.session.prompt_end(len(tokens)) as phases, self.cache.restored_on_error():
            phases.room = len(tokens)
            for first in range(0, len(tokens), self.chunk):
                part = tokens[first : first + self.chunk]
                targets = torch.tensor(tokens[first + 1 : first + 1 + len(part)], device=self.session.model.device)
                logits = self._forward(part, 0)
                for at in range(0, len(targets), ROWS):
                    these = targets[at : at + ROWS]
                    found.append(F.cross_entropy(logits[at : at + len(these)].float(), these, reduction="none"))
                progress(len(part))
        self.read_seconds += now(self.session.model) - started
        return torch.cat(found)

    @contextmanager
    def rollback(self, *methods: AttentionMethod) -> Iterator[None]:
        """Forget all that is read or decoded within this block (`LongreachCache.rollback`).

        methods: those whose state may change, such as the decode method where nothing is read; none for all.
        """
        with self.cache.rollback(*methods):
            yield

    def ask(
        self, tokens: Sequence[int], max_new_tokens: int, stop: Sequence[int], answer: Answer
    ) -> Generator[int, None, None]:
        """Greedy tokens after document and question, each as it comes, until a stop token (not yielded)."""
        check_length(self.session.model, self.cache.columns + len(tokens), max_new_tokens)
        if self.session.evict is not None:
            raise Unsupported(
                f"ask goes back to the document after each answer, and {self.session.evict.name} evicts keys of it; "
                f"read document and question as one prompt, or attach without evict"
            )
        with self.rollback():
            started = now(self.session.model)
            logits = self._pass(tokens, then=max_new_tokens - 1)
            with closing(self.decode(logits, max_new_tokens, answer, stop)) as chosen:
                for token in chosen:
                    if not answer.tokens and not answer.stopped:
                        answer.first_token_seconds = time.perf_counter() - started
                    answer.stopped = token in stop
                    if not answer.stopped:
                        answer.tokens.append(token)
                        yield token

    def decode(
        self, logits: Tensor, most: int, answer: Answer, stop: Sequence[int] = (), choose: Choose = greedy
    ) -> Generator[int, None, None]:
        """Up to `most` tokens after what the cache holds, a stop token the last; the first is chosen from `logits` [V].

        answer: gets the times. choose: makes tokens [1] of logits [1, V]; it may be asked a few times past the end.
        """
        makes = vocabulary_of(self.session.model)
        ends = Ends(tuple(t for t in stop if t < makes), 0)
        run = DecodeRun(self.session, most, ends, choose, graph=self.graph)
        try:
            with (
                memory_errors(),
                self.session.prompt_end(self.cache.columns),
                closing(run.tokens(self.cache, logits[None])) as tokens,
            ):
                for token in tokens:
                    yield int(token)
        finally:
            answer.setup_seconds, answer.decode_seconds, answer.steps = run.setup_seconds, run.decode_seconds, run.steps

    def _pass(self, tokens: Sequence[int], progress: Advance = _ignore, then: int = 0) -> Tensor:
        if not tokens:
            raise InvalidInput("expected at least one token, got none")
        first = 0
        try:
            end = self.cache.columns + len(tokens)
            with memory_errors(), self.session.prompt_end(end) as phases, self.cache.restored_on_error():
                phases.room = end + then
                for first in range(0, len(tokens), self.chunk):
                    part = tokens[first : first + self.chunk]
                    logits = self._forward(part)
                    progress(len(part))
        except OutOfMemory as error:
            raise OutOfMemory(
                f"memory ran out after {first} of {len(tokens)} prompt tokens, read {self.chunk} at a time; lower the "
                f"prefill chunk size (--prefill-chunk-size) or shorten the document"
            ) from error
        return logits

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], keep: int = 1) -> Tensor:
        """Logits [V] in fp32 after the last token; [T, V] as they are for keep=0."""
        model = self.session.model
        ids = torch.tensor([list(tokens)], device=model.device)
        logits = model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep).logits[0]
        return logits[-1].float() if keep else logits


def context_limit(model: Any) -> int | None:
    """Tokens the model was made for; None where its configuration does not say."""
    return getattr(text_config(model), "max_position_embeddings", None)


def check_length(model: Any, prompt: int, max_new_tokens: int) -> None:
    """Raise InvalidInput where prompt and answer are longer than the model's context."""
    limit = context_limit(model)
    if limit is not None and prompt + max_new_tokens > limit:
        raise InvalidInput(
            f"document and question are {prompt} tokens and the answer may take {max_new_tokens}, but the model's "
            f"context is {limit} tokens; shorten the document by {prompt + max_new_tokens - limit} tokens, or ask for "
            f"a shorter answer"
        )


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer, from the generation config and the tokenizer."""
    found = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, (list, tuple)) else ({value} if value is not None else set())
    return tuple(sorted(found))


def stop_strings(model: Any) -> tuple[str, ...]:
    """Texts that end an answer, from the generation config."""
    value = getattr(model.generation_config, "stop_strings", None)
    return (value,) if isinstance(value, str) else tuple(value or ())


def encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Tokens of a prompt that is to be gone on with: special ones at its beginning if asked for, none at its end."""
    ids = list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
    if special and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def chat(tokenizer: Any, turn: str) -> str | None:
    """What a user says, in the tokenizer's chat template, up to where the answer begins; None where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program of the model's: it may raise anything
        why = f"{type(error).__name__}: {error}"
        raise ModelFileError(f"the tokenizer's chat template failed ({why}); mend it or remove it") from error


def prompts(tokenizer: Any, document: str, questions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """(tokens all prompts begin with, what each goes on with): the document is read once, exactly as in each prompt.

    Questions come after the document, in the tokenizer's chat template where it has one, else as "Question: ...
    Answer:". Raises InvalidInput for an empty document or question.
    """
    if not document.strip():
        raise InvalidInput("the document is empty; give one with text in it")
    if not questions or not all(question.strip() for question in questions):
        raise InvalidInput("a question is empty; ask something")

    if any("\ud800" <= c <= "\udfff" for text in (document, *questions) for c in text):
        raise InvalidInput("document and questions must be text; one of them holds bytes that are no UTF-8")

    def prompt(question: str) -> list[int]:
        text = f"{document.rstrip()}\n\n"
        written = chat(tokenizer, text + question)
        if written is not None:
            return encode(tokenizer, written, special=False)
        return encode(tokenizer, f"{text}Question: {question}\nAnswer:")

    return share([prompt(q) for q in questions], prompt("?"))


def share(sequences: Sequence[list[int]], other: list[int]) -> tuple[list[int], list[list[int]]]:
    """Split sequences after the longest prefix they share with `other`; each keeps at least one token of its own."""
    common = min(len(s) for s in (*sequences, other)) - 1
    for sequence in sequences:
        for i in range(common):
            if sequence[i] != other[i]:
                common = i
                break
    if common < 1:
        raise InvalidInput("the prompts share no beginning; the chat template puts the question before the document")
    return other[:common], [s[common:] for s in sequences]
