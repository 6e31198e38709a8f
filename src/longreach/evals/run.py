"""Questions about one document: its KV is computed once, each answer streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from longreach.adapters.transformers import (
    CHUNK,
    Answer,
    LongreachCache,
    Reader,
    Session,
    check_length,
    pieces,
    prompts,
    stop_strings,
    stop_tokens,
)
from longreach.cache import CacheConfig
from longreach.evals.progress import Progress, unseen


@dataclass(frozen=True)
class QuestionAnswer:
    """One question and its answer. first_token_seconds counts from the question; the document was read before.

    stopped: the model ended its answer, max_new_tokens did not. setup_seconds: the first steps, which
    may load or compile code, and capturing.
    """

    question: str
    answer: str
    prompt_tokens: int
    tokens: int
    stopped: bool
    first_token_seconds: float
    seconds_per_token: float | None
    setup_seconds: float = 0.0


class Questions:
    """Questions about one document in the tokens of one model.

    Raises InvalidInput for an empty document or question, and where they and the answer exceed the model's context.
    """

    def __init__(self, model: Any, tokenizer: Any, document: str, questions: Sequence[str], max_new_tokens: int = 128,
                 cache: CacheConfig | None = None):  # fmt: skip
        """cache: its place in memory; the capacity is that of the document and the longest question and answer."""
        self.model, self.tokenizer, self.questions = model, tokenizer, tuple(questions)
        self.max_new_tokens = max_new_tokens
        self.document, self.rests = prompts(tokenizer, document, questions)
        longest = len(self.document) + max(map(len, self.rests))
        check_length(model, longest, max_new_tokens)
        self.cache = replace(cache or CacheConfig(), capacity=longest + max_new_tokens)
        self.answered: list[QuestionAnswer] = []

    def read(
        self, session: Session, chunk: int = CHUNK, progress: Progress = unseen, *, graph: bool | None = None,
        cache: LongreachCache | None = None,
    ) -> Reader:  # fmt: skip
        """Compute the document's KV. graph: whether decoding is captured, as in `generate`. cache: one that holds the
        document's first tokens, which are not read again."""
        reader = Reader(session, chunk, graph=graph)
        reader.cache = reader.cache if cache is None else cache
        with progress("reading the document", len(self.document)) as advance:
            advance(reader.cache.columns)
            if rest := self.document[reader.cache.columns :]:
                reader.read(rest, advance)
        return reader

    def ask(self, reader: Reader, number: int) -> Iterator[str]:
        """The answer to a question, piece by piece; when done, `answered` holds it whole."""
        rest, answer, text = self.rests[number], Answer(), ""
        stop = stop_tokens(self.model, self.tokenizer)
        with closing(reader.ask(rest, self.max_new_tokens, stop, answer)) as tokens:
            for piece in pieces(tokens, self.tokenizer, stop_strings(self.model)):
                text += piece
                yield piece
        self.answered.append(
            QuestionAnswer(
                self.questions[number],
                text.rstrip(),
                len(self.document) + len(rest),
                len(answer.tokens),
                len(answer.tokens) < self.max_new_tokens or answer.stopped,
                answer.first_token_seconds,
                answer.seconds_per_token,
                answer.setup_seconds,
            )
        )
