"""Documents that are stored as chunks, and questions about them: what a program that retrieves documents needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from longreach.adapters.transformers.answer_text import pieces
from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.chunking import TOKENS, Splitter
from longreach.adapters.transformers.fingerprint import Fingerprint
from longreach.adapters.transformers.fusing import FusedPrompt, FusionReport, read
from longreach.adapters.transformers.get_or_compute import State, get_or_compute
from longreach.adapters.transformers.loop.run import now
from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.prompt_reader import CHUNK, Advance, Answer, Reader
from longreach.adapters.transformers.prompt_tokens import check_length, encode, frame, stop_strings, stop_tokens
from longreach.errors import InvalidInput, StoreError
from longreach.store import Chunk, ChunkStore

BETWEEN = "\n\n"  # two documents, and the last one and the question


@dataclass(frozen=True)
class Account:
    """What an answer took. fusion: what became of the prompt's tokens. first_token_seconds: from the question on;
    read_seconds: of them, until the prompt was in the cache. answer: tokens and times of decoding.
    """

    fusion: FusionReport
    read_seconds: float
    first_token_seconds: float
    answer: Answer


@dataclass(frozen=True)
class ChunkOrigin:
    """Where a document's chunk came from. document: its number. error: why the store does not have it, else None."""

    document: int
    tokens: int
    state: State
    error: StoreError | None


class Documents:
    """Documents as chunks of keys and values, and questions about all of them at once.

    A prompt is the system prompt, the documents in the order that they were read, and the question; each is tokenised
    by itself, so that a document's chunks are the same in every prompt. What stands between them is computed, not
    stored. With a chat template the parts stand where the template has them.

    session: attached with a fusion method. store: where chunks are looked up and put; None: they are computed.
    system: text before the documents; chunks are computed behind it. chunk_tokens: of a chunk at most.
    prefill_chunk: tokens per pass while chunks are computed. known: the model's fingerprint, if it was taken.

    `origins` says of each chunk where it came from. Raises InvalidInput (no fusion method, a chat template that has no
    place for documents), and what Precompute and Splitter raise.
    """

    def __init__(
        self, session: Session, tokenizer: Any, *, system: str = "", store: ChunkStore | None = None,
        chunk_tokens: int = TOKENS, prefill_chunk: int = CHUNK, known: Fingerprint | None = None,
        graph: bool | None = None,
    ):  # fmt: skip
        if session.fuse is None:
            raise InvalidInput("documents are read by a fusion method; attach with fuse='a3' or another one")
        self.session, self.tokenizer, self.store = session, tokenizer, store
        self._frame = frame(tokenizer, system)
        self.head = encode(tokenizer, self._frame.head, special=not self._frame.templated)
        self._work = Precompute(session, self.head, chunk=prefill_chunk, known=known)
        self._splitter = Splitter(tokenizer, chunk_tokens)
        self._between = encode(tokenizer, BETWEEN, special=False)
        self._reader = Reader(session, prefill_chunk, graph=graph)
        self.chunks: list[list[Chunk]] = []  # of each document
        self.origins: list[ChunkOrigin] = []
        self.account: Account | None = None  # of the last answer

    def read(self, texts: Sequence[str], progress: Advance = lambda done: None) -> None:
        """Add documents. Their chunks come from the store, or are computed and stored on the way.

        progress is told how many tokens more are done. Raises InvalidInput for no document or an empty one, and as
        get_or_compute; then no document is added.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidInput("expected a list of documents with at least one text in it")
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise InvalidInput(f"document {len(self.chunks) + number} is empty or no text; leave it out")
        split = [self._splitter.split(text).chunks for text in texts]
        found, origins = list[list[Chunk]](), list[ChunkOrigin]()
        for document in split:
            chunks = list[Chunk]()
            for piece in document:
                got = get_or_compute(self._work, self.store, piece.tokens, progress)
                chunks.append(got.chunk)
                number = len(self.chunks) + len(found)
                origins.append(ChunkOrigin(number, len(piece.tokens), got.state, got.error))
            found.append(chunks)
        self.chunks += found
        self.origins += origins

    def count(self, texts: Sequence[str]) -> int:
        """Tokens of the chunks of these texts, for a progress bar."""
        return sum(len(self._splitter.split(text).tokens) for text in texts)

    def prompt(self, question: str) -> FusedPrompt:
        """The prompt of a question about all documents. Raises InvalidInput for none of either."""
        if not isinstance(question, str) or not question.strip():
            raise InvalidInput("the question is empty; ask something")
        if not self.chunks:
            raise InvalidInput("no documents were read; call read first")
        parts: list[Any] = [self.head]
        for number, chunks in enumerate(self.chunks):
            parts += [*([self._between] if number else []), *chunks]
        return FusedPrompt.of([*parts, encode(self.tokenizer, BETWEEN + self._frame.tail(question), special=False)])

    def ask(self, question: str, max_new_tokens: int = 128) -> Iterator[str]:
        """The answer, piece by piece; afterwards `account` says what it took.

        Every question begins with an empty cache, so that eviction for one does not touch the next. Raises InvalidInput
        (also where prompt and answer exceed the model's context), and as `fusing.read`.
        """
        prompt, model = self.prompt(question), self.session.model
        check_length(model, len(prompt.ids), max_new_tokens)
        self.account = None
        return self._answer(prompt, model, max_new_tokens)

    def _answer(self, prompt: FusedPrompt, model: Any, max_new_tokens: int) -> Iterator[str]:
        reader, answer = self._reader, Answer()
        started = now(model)
        reader.cache.empty()
        logits, report = read(self.session, reader.cache, prompt, then=max_new_tokens - 1)
        read_seconds = now(model) - started
        stop, first = stop_tokens(model, self.tokenizer), 0.0

        def until_stop(tokens: Iterator[int]) -> Iterator[int]:
            nonlocal first
            for token in tokens:
                first = first or now(model) - started
                answer.stopped = token in stop
                if answer.stopped:
                    return
                answer.tokens.append(token)
                yield token

        with closing(reader.decode(logits, max_new_tokens, answer, stop)) as tokens:
            yield from pieces(until_stop(tokens), self.tokenizer, stop_strings(model))
        answer.first_token_seconds = first
        self.account = Account(report, read_seconds, first, answer)
