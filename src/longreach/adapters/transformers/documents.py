"""Documents that are stored as chunks, and questions about them: what a program that retrieves documents needs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from longreach.adapters.transformers.answer_text import pieces
from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.chunking import TOKENS, Splitter
from longreach.adapters.transformers.control_tokens import Part
from longreach.adapters.transformers.dependence import DependenceMeter
from longreach.adapters.transformers.fingerprint import Fingerprint
from longreach.adapters.transformers.fusing import FusedPrompt, FusionReport, read
from longreach.adapters.transformers.get_or_compute import ChunkResult, State, get_or_compute
from longreach.adapters.transformers.loop.run import now
from longreach.adapters.transformers.placement import BETWEEN, ChunkPlace, places
from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.prompt_reader import CHUNK, Advance, Answer, BatchReader, Reader
from longreach.adapters.transformers.prompt_tokens import (
    context_limit,
    document_head,
    encode,
    encode_parts,
    short_context,
    stop_strings,
    stop_tokens,
)
from longreach.adapters.transformers.ranks import together
from longreach.errors import ConcurrentUse, InvalidInput, StoreError
from longreach.methods.base import is_count
from longreach.store import Chunk, ChunkPool, ChunkStore
from longreach.store.absent import absent_message
from longreach.store.key import ChunkKey


@dataclass(frozen=True)
class ChunkSources:
    """Where the chunks of a prompt came from, counted by `ChunkOrigin.state`.

    errors: messages of the store, each once. Broken files are not among them; `recomputed` counts these.
    absent: if the store had no chunk of the last documents read, a message that describes what it holds; else None.
    """

    held: int
    stored: int
    computed: int
    recomputed: int
    errors: tuple[str, ...]
    absent: str | None


@dataclass(frozen=True)
class Account:
    """What an answer took. fusion: what became of the prompt's tokens. first_token_seconds: from the question on;
    read_seconds: of them, until the prompt was in the cache. answer: tokens and times of decoding. chunks: where they
    came from.
    """

    fusion: FusionReport
    read_seconds: float
    first_token_seconds: float
    answer: Answer
    chunks: ChunkSources


@dataclass(frozen=True)
class ChunkOrigin:
    """Where a document's chunk came from.

    document: its number. error: why the store does not have it, else None. exact: whether it was computed behind
    everything that is before it in the prompt. dependence_computed: whether its dependence was.
    """

    document: int
    tokens: int
    state: State
    error: StoreError | None
    exact: bool
    dependence_computed: bool


class Documents:
    """Documents as chunks of keys and values, and questions about all of them at once.

    A prompt is the system prompt, the documents in the order that they were read, and the question; each is tokenised
    by itself, so that a document's chunks are the same in every prompt. What stands between them is computed, not
    stored. With a chat template the parts stand where the template has them. Control tokens that documents, questions
    or the system prompt spell out (`</s>`) are read as text.

    session: attached with a fusion method. store: where chunks are looked up and put; None: they are computed.
    A chunk that the store has behind exactly what precedes it in this prompt is taken first, since it is exact; else
    the one behind the head alone. If the fusion method needs the dependence of tokens, chunks stored without it get it.
    Chunks are read into memory, so that what becomes of their files later does not matter.

    system: text before the documents; chunks are computed behind it. chunk_tokens: of a chunk at most.
    prefill_chunk: tokens per pass while chunks are computed. known: the model's fingerprint, if it was taken.
    pool: where chunks wait to be copied to the model's device, to be shared by Documents whose chunks may be the same;
    on a CUDA device by default one of its own.

    Under tensor parallelism every rank makes the same calls. Where one fails, all raise: that one its own error, the
    others OtherRankFailed. Documents, caches and stores are then as after any error. An error in the middle of a
    pass or of decoding is not shared: the others wait until the process group's timeout (see `ranks.py`).

    `origins` has the source of each chunk. Raises InvalidInput (no fusion method, an argument of another type, a chat
    template that has no place for documents), and what Precompute and Splitter raise.
    """

    def __init__(
        self, session: Session, tokenizer: Any, *, system: str = "", store: ChunkStore | None = None,
        chunk_tokens: int = TOKENS, prefill_chunk: int = CHUNK, known: Fingerprint | None = None,
        graph: bool | None = None, pool: ChunkPool | None = None,
    ):  # fmt: skip
        if session.fuse is None:
            raise InvalidInput("documents are read by a fusion method; attach with fuse='a3' or another one")
        if not isinstance(system, str):
            raise InvalidInput(f"system: expected text (str), '' for none, got {system!r}")
        if store is not None and not isinstance(store, ChunkStore):
            raise InvalidInput(f"store: expected a ChunkStore or None, got {store!r}; open it with ChunkStore(folder)")
        if pool is not None and not isinstance(pool, ChunkPool):
            raise InvalidInput(f"pool: expected a ChunkPool or None, got {pool!r}")
        self.session, self.tokenizer, self.store = session, tokenizer, store
        self.pool = ChunkPool() if pool is None and session.model.device.type == "cuda" else pool
        self._frame, self.head = document_head(tokenizer, system)
        self._work = Precompute(session, self.head, chunk=prefill_chunk, known=known)
        self._meter = DependenceMeter(self._work) if session.fuse.needs_dependence else None
        self._short = short_context(session.model)
        self._splitter = Splitter(tokenizer, chunk_tokens)
        self._between = encode(tokenizer, BETWEEN, special=False)
        self._reader = Reader(session, prefill_chunk, graph=graph)
        self._batches: tuple[int, BatchReader] | None = None  # for so many questions
        self._answering = threading.Lock()  # held while the cache belongs to an answer
        self._documents: list[list[tuple[int, ...]]] = []  # tokens of each chunk of each
        self.chunks: list[list[Chunk]] = []  # of each document
        self.origins: list[ChunkOrigin] = []
        self.absent: str | None = None  # see ChunkSources
        self.account: Account | None = None  # of the last answer of `ask`
        self.accounts: list[Account] = []  # of the last answers of `ask_all`

    def read(
        self, texts: Iterable[str], progress: Advance = lambda done: None, *, exact: bool = False, reserve: int = 1
    ) -> None:  # fmt: skip
        """Add documents. Their chunks come from the store, or are computed and stored on the way.

        exact: chunks are computed behind everything before them, and stored so: later prompts that begin with the same
        system prompt and documents recompute none of them, in other prompts they are not used.
        progress: called with the number of further tokens that are done, of `count`. reserve: tokens of the model's
        context that must be left for a question and its answer. Raises InvalidInput for no document, an empty one, or
        documents too long for the context, before computing any chunk; and as get_or_compute. Whatever it
        raises, Ctrl-C included, no document is added; what was stored stays.
        """
        with together(self._work.ranks):
            self._read(texts, progress, exact, reserve)

    def clear(self) -> None:
        """Remove all documents. Their chunks stay in the store and the pool."""
        self._documents, self.chunks, self.origins, self.absent = [], [], [], None

    def _read(self, given: Iterable[str], progress: Advance, exact: bool, reserve: int) -> None:
        if not is_count(reserve):
            raise InvalidInput(f"reserve: expected a count of tokens >= 0, got {reserve!r}")
        texts = _listed(given, "documents with at least one text in it")
        self._work.require_weights()
        for number, text in enumerate(texts):
            name = f"document {len(self.chunks) + number}"
            if not isinstance(text, str):
                raise InvalidInput(f"{name}: expected text (str), got {type(text).__name__}; decode it first")
            if not text.strip():
                raise InvalidInput(f"{name} is empty; leave it out")
        documents = [*self._documents, *([p.tokens for p in self._splitter.split(t).chunks] for t in texts)]
        new = places(documents, self._between)[len(self.origins) :]
        for place in new:
            self._work.check(place.tokens, place.before if exact else ())
        self._check_length(len(new[-1].before) + len(new[-1].tokens), reserve)
        found, origins, states = [list[Chunk]() for _ in texts], list[ChunkOrigin](), dict[ChunkKey, State]()
        for place in new:
            got = self._chunk(place, exact, progress)
            found[place.document - len(self.chunks)].append(got.chunk)
            origins.append(self._origin(place, got))
            states.setdefault(got.chunk.key, got.state)  # a document given twice is stored by then
        none = self.store is not None and {*states.values()} == {"computed"}
        self.absent = absent_message(self.store, list(states)) if self.store is not None and none else None
        self._documents = documents
        self.chunks, self.origins = [*self.chunks, *found], [*self.origins, *origins]

    def _chunk(self, place: ChunkPlace, exact: bool, progress: Advance = lambda done: None) -> ChunkResult:
        measure = None
        # what stands first is exact, but in prompts that are rotated by other frequencies
        if self._meter is not None and place.other is not None and (len(place.before) or self._short is not None):
            measure = self._meter, place.other
        got = get_or_compute(
            self._work, self.store, place.tokens, progress, behind=place.before, exact=exact, dependence=measure,
            mapped=False, pool=self.pool,
        )  # fmt: skip
        if self._meter is not None and measure is None:
            progress(len(place.tokens))
        return got

    def _origin(self, place: ChunkPlace, got: ChunkResult) -> ChunkOrigin:
        exact = len(got.chunk.prefix) == len(self.head) + len(place.before)
        return ChunkOrigin(place.document, len(place.tokens), got.state, got.error, exact, got.dependence_computed)

    def count(self, texts: Sequence[str]) -> int:
        """Tokens that `read` of these texts is done with, for a progress bar: those of dependence are counted twice."""
        tokens = sum(len(self._splitter.split(text).tokens) for text in texts)
        return tokens if self._meter is None else 2 * tokens

    def prompt(self, question: str) -> FusedPrompt:
        """The prompt of a question about all documents. Raises InvalidInput for no documents; as question_tokens."""
        if not self.chunks:
            raise InvalidInput("no documents were read; call read first")
        parts: list[Any] = [self.head]
        for number, chunks in enumerate(self.chunks):
            parts += [*([self._between] if number else []), *chunks]
        return FusedPrompt.of([*parts, self.question_tokens(question)])

    def question_tokens(self, question: str) -> list[int]:
        """The tokens behind the documents: the question, and the rest of the chat template. Raises InvalidInput, also
        for a question that an eviction method cannot keep."""
        if not isinstance(question, str) or not question.strip():
            raise InvalidInput("the question is empty; ask something")
        if any("\ud800" <= c <= "\udfff" for c in question):
            raise InvalidInput("the question must be text; this one holds bytes that are not UTF-8")
        parts = [Part(BETWEEN, False), *self._frame.tail(question)]
        tokens, head = encode_parts(self.tokenizer, parts, special=False), len(self.head)
        if self.session.evict is not None:
            self.session.evict.check_parts(head + len(tokens), head, len(tokens))
        return tokens

    def _sources(self) -> ChunkSources:
        counts = Counter(origin.state for origin in self.origins)
        errors = dict.fromkeys(str(origin.error) for origin in self.origins if origin.error is not None)
        return ChunkSources(
            counts["held"], counts["stored"], counts["computed"], counts["recomputed"], tuple(errors), self.absent
        )

    def _check_prompt(self, prompt: FusedPrompt, max_new_tokens: int) -> None:
        """Raise InvalidInput if prompt and answer exceed the model's context."""
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens: expected a count >= 1, got {max_new_tokens!r}")
        self._check_length(prompt.question - len(self.head), len(prompt.ids) - prompt.question + max_new_tokens)

    def _check_length(self, documents: int, rest: int) -> None:
        """Raise InvalidInput if tokens of documents, and `rest` for question and answer, exceed the model's context."""
        limit, head = context_limit(self.session.model), len(self.head)
        if limit is None or (over := head + documents + rest - limit) <= 0:
            return
        what = "the documents" if head + rest < limit else "the question or the answer"
        raise InvalidInput(
            f"the documents are {documents} tokens, the system prompt is {head}, and question and answer take at least "
            f"{rest}, but the model's context is {limit} tokens; shorten {what} by {over} tokens"
        )

    def ask(self, question: str, max_new_tokens: int = 128) -> Iterator[str]:
        """The answer, piece by piece; afterwards `account` has its tokens and times.

        Every question begins with an empty cache, so that eviction for one does not touch the next. Raises
        ConcurrentUse (another answer is in progress; it goes on), InvalidInput (also where prompt and answer exceed the
        model's context, for a model in training mode, and after the session was closed), Unsupported
        (weights changed since the chunks were computed), and as `fusing.read`.
        """
        with together(self._work.ranks):
            self._work.require_weights()
            prompt = self.prompt(question)
            self._check_prompt(prompt, max_new_tokens)
        return self._answer(prompt, max_new_tokens)

    def ask_all(self, questions: Iterable[str], max_new_tokens: int = 128) -> list[str]:
        """The answers to several questions, read and decoded as one batch; `accounts` then has the tokens and
        times of each.

        Each answer is that of `ask`, up to rounding. Chunks are copied to the device once for all
        questions, and placed for each, which keeps keys and values of its own: the cache takes as much memory for each
        question as `ask` does. Times in the accounts are those of the whole batch. Raises as `ask`, and InvalidInput
        for no questions.
        """
        model = self.session.model
        with ExitStack() as stack:
            with together(self._work.ranks):
                listed = _listed(questions, "questions with at least one in it")
                self._work.require_weights()
                prompts = [self.prompt(question) for question in listed]
                for prompt in prompts:
                    self._check_prompt(prompt, max_new_tokens)
                stack.enter_context(self._exclusive())
                self.accounts = []
                if self._batches is None or self._batches[0] != len(prompts):  # frees memory of another batch size
                    reader = BatchReader(self.session, self._reader.chunk, graph=self._reader.graph)
                    self._batches = len(prompts), reader
                started, reader = now(model), self._batches[1]
                logits, reports = reader.read_fused_batch(prompts, then=max_new_tokens - 1)
            read_seconds = now(model) - started
            batch = reader.answer(logits, max_new_tokens, stop_tokens(model, self.tokenizer))
        first = now(model) - started - batch.setup_seconds - batch.evict_seconds - batch.decode_seconds
        texts = []
        for tokens, stopped, report in zip(batch.tokens, batch.stopped, reports, strict=True):
            took = batch.setup_seconds, batch.decode_seconds, batch.steps, batch.evict_seconds
            answer = Answer([], False, first, *took)
            noted = _noted(tokens, stopped, answer)
            texts.append("".join(pieces(noted, self.tokenizer, stop_strings(model))))
            self.accounts.append(Account(report, read_seconds, first, answer, self._sources()))
        return texts

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """A block of one answer. Raises ConcurrentUse while another is in progress, before anything is changed."""
        if not self._answering.acquire(blocking=False):
            raise ConcurrentUse(
                "an answer from these documents is in progress; finish or close it first, or use other Documents on "
                "another model object"
            )
        try:
            yield
        finally:
            self._answering.release()

    def _answer(self, prompt: FusedPrompt, max_new_tokens: int) -> Iterator[str]:
        reader, answer, model = self._reader, Answer(), self.session.model
        started = now(model)
        with ExitStack() as stack:
            with together(self._work.ranks):
                stack.enter_context(self._exclusive())
                self.account = None
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
            self.account = Account(report, read_seconds, first, answer, self._sources())


def _listed(texts: Iterable[str], what: str) -> list[str]:
    """Texts as a list. Raises InvalidInput for a single text, for none, and for what is no collection of them."""
    found = [] if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable) else list(texts)
    if not found:
        raise InvalidInput(f"expected a list of {what}")
    return found


def _noted(tokens: Sequence[int], stopped: bool, answer: Answer) -> Iterator[int]:
    """The tokens, noted in the answer as they are taken; a stop string may end it before the stop token."""
    for token in tokens:
        answer.tokens.append(token)
        yield token
    answer.stopped = stopped
