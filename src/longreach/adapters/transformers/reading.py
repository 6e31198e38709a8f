"""Read a document once, ask it several questions: prefill, greedy decoding and its timing on an attached model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers.attach import Session, memory_errors
from longreach.adapters.transformers.checks import text_config
from longreach.errors import InvalidInput

CHUNK = 512  # prompt tokens per pass: short enough for a progress bar to move


@dataclass
class Answer:
    """One answer as it comes: tokens without the stop token; seconds are wall-clock, waiting for the device."""

    tokens: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a decode step; None before there was one."""
        return self.decode_seconds / self.steps if self.steps else None


class Reader:
    """A document in the KV cache of a session; every question starts from it and leaves it as it was."""

    def __init__(self, session: Session, chunk: int = CHUNK):
        if chunk < 1:
            raise InvalidInput(f"prefill chunk: expected at least 1 token, got {chunk}")
        self.session, self.chunk = session, chunk
        self.cache = session.new_cache(1)
        self.read_seconds = 0.0

    def read(self, tokens: Sequence[int], progress: Callable[[int], None] = lambda n: None) -> None:
        """Put the document into the cache. progress is told how many tokens were read, pass by pass."""
        started = self._now()
        self._pass(tokens, progress)
        self.read_seconds += self._now() - started

    def ask(self, tokens: Sequence[int], max_new_tokens: int, stop: Sequence[int], answer: Answer) -> Iterator[int]:
        """Greedy tokens after document and question, each as it comes, until a stop token (not yielded)."""
        document = self.cache.columns
        check_length(self.session, document + len(tokens), max_new_tokens)
        started = self._now()
        try:
            logits = self._pass(tokens)
            token = int(logits.argmax())
            answer.first_token_seconds = self._now() - started
            while token not in stop:
                answer.tokens.append(token)
                yield token
                if len(answer.tokens) >= max_new_tokens:
                    return
                begun = self._now()
                token = int(self.step(token).argmax())
                answer.decode_seconds += self._now() - begun
                answer.steps += 1
        finally:
            self.cache.drop_columns(self.cache.columns - document)

    def step(self, token: int) -> Tensor:
        """One decode step: logits [V] after `token`, fp32."""
        with memory_errors(), self.session.prompt_end(self.cache.columns):
            return self._forward([token])

    def prompt(self, tokens: Sequence[int]) -> Tensor:
        """Prefill `tokens` after what is in the cache: logits [V] after the last, fp32."""
        return self._pass(tokens)

    def _pass(self, tokens: Sequence[int], progress: Callable[[int], None] = lambda n: None) -> Tensor:
        if not tokens:
            raise InvalidInput("expected at least one token, got none")
        with memory_errors(), self.session.prompt_end(self.cache.columns + len(tokens)):
            for first in range(0, len(tokens), self.chunk):
                part = tokens[first : first + self.chunk]
                logits = self._forward(part)
                progress(len(part))
        return logits

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int]) -> Tensor:
        model = self.session.model
        ids = torch.tensor([list(tokens)], device=model.device)
        return model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()

    def _now(self) -> float:
        if self.session.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def context_limit(model: Any) -> int | None:
    """Tokens the model was made for; None where its configuration does not say."""
    return getattr(text_config(model), "max_position_embeddings", None)


def check_length(session: Session, prompt: int, max_new_tokens: int) -> None:
    """Raise InvalidInput where prompt and answer are longer than the model's context."""
    limit = context_limit(session.model)
    if limit is not None and prompt + max_new_tokens > limit:
        raise InvalidInput(
            f"document and question are {prompt} tokens, with {max_new_tokens} for the answer, but the model's context "
            f"is {limit}; shorten the document or lower --max-new-tokens"
        )


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer, from the generation config and the tokenizer."""
    found = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, (list, tuple)) else ({value} if value is not None else set())
    return tuple(sorted(found))


def prompts(tokenizer: Any, document: str, questions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """(tokens all prompts begin with, what each goes on with): the document is read once, exactly as in each prompt.

    Questions come after the document, in the tokenizer's chat template where it has one, else as "Question: ...
    Answer:". Raises InvalidInput for an empty document or question.
    """
    if not document.strip():
        raise InvalidInput("the document is empty; give one with text in it")
    for question in questions:
        if not question.strip():
            raise InvalidInput("a question is empty; ask something")

    def encode(question: str) -> list[int]:
        if getattr(tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": f"{document}\n\n{question}"}]
            text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False).input_ids)
        return list(tokenizer(f"{document.rstrip()}\n\nQuestion: {question}\nAnswer:").input_ids)

    return share([encode(q) for q in questions], encode("?"))


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
