"""Prompts that are read once and answered several times, on an attached model.

`Reader`: one document, questions one after another, each token as it comes. `BatchReader`: a batch of prompts, answered
by several decode methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.fusing import FusedPrompt, FusionReport
from longreach.adapters.transformers.fusing import read as fused
from longreach.adapters.transformers.fusing import read_batch as fused_batch
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.decoder import vocabulary_of
from longreach.adapters.transformers.loop.prefill import prefill
from longreach.adapters.transformers.loop.run import Choose, DecodeRun, GraphOption, capture_for, now
from longreach.adapters.transformers.loop.sampling import Ends, Sampler, greedy
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.prompt_tokens import check_length
from longreach.adapters.transformers.recurrent import pass_size
from longreach.errors import InvalidInput, OutOfMemory, Unsupported
from longreach.methods.base import AttentionMethod, is_count

CHUNK = 512  # prompt tokens per pass: short enough for a progress bar to move
ROWS = 64  # of logits that are made fp32 at a time
Advance = Callable[[int], None]  # called with the number of further units of work that are done


def _ignore(done: int) -> None:
    """The default progress callback."""


@dataclass
class Answer:
    """One answer, filled while it is decoded: tokens without the stop token, and wall-clock seconds.

    stopped: whether it ended with a stop token rather than at max_new_tokens. setup_seconds: the first steps, which
    may load or compile code, and capturing; decode_seconds: the other `steps` steps; evict_seconds: eviction,
    between the first token and the first step (see `loop.DecodeRun`).
    """

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    first_token_seconds: float = 0.0
    setup_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    evict_seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a decode step after the setup, else None."""
        return self.decode_seconds / self.steps if self.steps else None


@dataclass(frozen=True)
class BatchAnswer:
    """Answers to the prompts of a batch, in their order.

    tokens: without the stop token. stopped: whether each ended with one. setup_seconds, decode_seconds, steps,
    evict_seconds: see `loop.DecodeRun`. not_captured: why the steps were not one CUDA graph, else None.
    """

    tokens: tuple[tuple[int, ...], ...]
    stopped: tuple[bool, ...]
    setup_seconds: float
    decode_seconds: float
    steps: int
    not_captured: str | None
    evict_seconds: float = 0.0


class Reader:
    """A document in the KV cache of a session. Every question starts after it and is rolled back.

    chunk: prompt tokens per pass (of some hybrid models: see `pass_size`). graph: whether decode steps are captured in
        a CUDA graph, as in `generate`.
    """

    def __init__(self, session: Session, chunk: int = CHUNK, *, graph: bool | None = None):
        if not is_count(chunk, 1):
            raise InvalidInput(f"prefill chunk: expected a count of tokens >= 1, got {chunk!r}")
        self.session, self.chunk, self.graph = session, chunk, graph
        self.cache = session.new_cache(1)
        self.read_seconds = 0.0

    def read(self, tokens: Sequence[int], progress: Advance = _ignore, *, then: int = 0) -> Tensor:
        """Read the document into the cache; logits [V] after it. progress: called with the tokens that each pass read.

        then: tokens of the longest question and answer; the cache reserves room for them.
        """
        started = now(self.session.model)
        logits = self._pass(tokens, progress, then)
        self.read_seconds += now(self.session.model) - started
        return logits

    def read_fused(self, prompt: FusedPrompt, *, then: int = 0) -> tuple[Tensor, FusionReport]:
        """Read a prompt by the session's fusion method into the empty cache, as `fusing.read`."""
        started = now(self.session.model)
        read = fused(self.session, self.cache, prompt, then=then)
        self.read_seconds += now(self.session.model) - started
        return read

    def score(self, tokens: Sequence[int], progress: Advance = _ignore) -> Tensor:
        """-log p of each token but the first given those before it, fp32 [T - 1], in nats. Reads into the empty cache.

        Logits of a chunk are reduced a few rows at a time: [chunk, V] is never held in fp32.
        """
        if self.cache.columns:
            raise InvalidInput(f"score reads a text from its beginning, the cache holds {self.cache.columns} tokens")
        if len(tokens) < 2:
            raise InvalidInput(f"expected at least two tokens, got {len(tokens)}")
        started, found = now(self.session.model), list[Tensor]()
        with memory_errors(), self.session.prompt_end(len(tokens)) as phases, self.cache.restored_on_error():
            phases.room = len(tokens)
            size = pass_size(self.session.facts, 0, self.chunk, len(tokens))
            for first in range(0, len(tokens), size):
                part = tokens[first : first + size]
                targets = torch.tensor(tokens[first + 1 : first + 1 + len(part)], device=self.session.model.device)
                logits = self._forward(part, 0)
                for at in range(0, len(targets), ROWS):
                    these = targets[at : at + ROWS]
                    found.append(F.cross_entropy(logits[at : at + len(these)].float(), these, reduction="none"))
                progress(len(part))
        self.read_seconds += now(self.session.model) - started
        self.session.make_plans(self.cache)
        return torch.cat(found)

    @contextmanager
    def rollback(self, *methods: AttentionMethod) -> Iterator[None]:
        """Roll back all that is read or decoded within this block (`LongreachCache.rollback`).

        methods: those whose state may change, for example the decode method if no prompt is read; none for all.
        """
        with self.cache.rollback(*methods):
            yield

    def ask(
        self, tokens: Sequence[int], max_new_tokens: int, stop: Sequence[int], answer: Answer
    ) -> Generator[int, None, None]:
        """Greedy tokens after document and question, yielded one by one, up to a stop token (not yielded)."""
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
        """Up to `most` tokens after those in the cache, the first from `logits` [V]; a stop token is the last.

        answer: receives the times. choose: tokens [1] from logits [1, V]; may be called a few times past the end.
        """
        run = DecodeRun(self.session, most, _ends(self.session, stop), choose, graph=self.graph)
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
            answer.evict_seconds = run.evict_seconds

    def warm_up(self, logits: Tensor, most: int) -> None:
        """Run and roll back one decode step, and reset the report, so that what is compiled at a first step is in no
        time.

        Does nothing where steps are captured, whose first ones count as setup. logits: [V], after the cache. most:
        tokens of the answer to come.
        """
        _warm_up(self.session, self.cache, logits[None], most, self.graph)

    def _pass(self, tokens: Sequence[int], progress: Advance = _ignore, then: int = 0) -> Tensor:
        if not tokens:
            raise InvalidInput("expected at least one token, got none")
        first = 0
        try:
            end = self.cache.columns + len(tokens)
            with memory_errors(), self.session.prompt_end(end) as phases, self.cache.restored_on_error():
                phases.room = end + then
                size = pass_size(self.session.facts, self.cache.columns, self.chunk, len(tokens))
                for first in range(0, len(tokens), size):
                    part = tokens[first : first + size]
                    logits = self._forward(part)
                    progress(len(part))
        except OutOfMemory as error:
            raise OutOfMemory(
                f"memory ran out after {first} of {len(tokens)} prompt tokens, read {self.chunk} at a time; lower the "
                f"prefill chunk size (--prefill-chunk-size), shorten the document, or keep keys and values in host "
                f"memory (--host)"
            ) from error
        return logits

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], keep: int = 1) -> Tensor:
        """Logits [V] in fp32 after the last token; [T, V] as they are for keep=0."""
        model = self.session.model
        ids = torch.tensor([list(tokens)], device=model.device)
        logits = model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep).logits[0]
        return logits[-1].float() if keep else logits


class BatchReader:
    """Prompts in the KV cache of a session. Every answer starts after them and is rolled back.

    One cache is kept for each batch size, so later batches reuse a method's captured step.
    chunk: prompt columns per pass. graph: whether decode steps are captured, as in `generate`.
    """

    def __init__(self, session: Session, chunk: int = CHUNK, *, graph: bool | None = None):
        self.session, self.chunk, self.graph = session, chunk, graph
        self._caches: dict[int, LongreachCache] = {}
        self.cache: LongreachCache | None = None
        self.read_seconds = 0.0

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]], progress: Advance = _ignore) -> Tensor:
        """Read prompts into the cache, replacing earlier ones; logits [B, V] after them. progress: columns read.

        Raises CapacityError, OutOfMemory; the cache is then empty.
        """
        device, batch, width = self.session.model.device, len(prompts), max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self.cache = None
        if batch not in self._caches:
            self._caches[batch] = self.session.new_cache(batch)
        cache = self._caches[batch]
        cache.empty()
        started = now(self.session.model)
        with memory_errors(), self.session.prompt_end(width), cache.restored_on_error():
            chunk = pass_size(self.session.facts, 0, self.chunk, ids.shape[1])
            logits = prefill(self.session, cache, ids, mask, chunk, progress)
        self.read_seconds = now(self.session.model) - started
        self.cache = cache
        return logits

    def read_fused(self, prompt: FusedPrompt) -> tuple[Tensor, FusionReport]:
        """Read one prompt by the session's fusion method; logits [1, V] after it, and what became of its tokens.

        Raises as `fusing.read`; the cache is then empty.
        """
        logits, (report,) = self.read_fused_batch([prompt])
        return logits, report

    def read_fused_batch(self, prompts: Sequence[FusedPrompt], *, then: int = 0) -> tuple[Tensor, list[FusionReport]]:
        """Read prompts over the same chunks by the session's fusion method, replacing earlier ones; logits [B, V]
        after them, and what became of the tokens of each.

        then: tokens that the longest answer will take. Raises as `fusing.read_batch`; the cache is then empty.
        """
        self.cache, batch = None, len(prompts)
        if batch not in self._caches:
            self._caches[batch] = self.session.new_cache(max(batch, 1))
        cache = self._caches[batch]
        cache.empty()
        started = now(self.session.model)
        logits, reports = fused_batch(self.session, cache, prompts, then=then)
        self.read_seconds = now(self.session.model) - started
        self.cache = cache
        return logits, reports

    def warm_up(self, logits: Tensor, most: int) -> None:
        """As `Reader.warm_up`; logits: [B, V]."""
        assert self.cache is not None
        _warm_up(self.session, self.cache, logits, most, self.graph)

    @torch.no_grad()
    def answer(
        self, logits: Tensor, most: int, stop: Sequence[int], *, temperature: float = 0.0, seed: int = 0,
        fed: Sequence[Sequence[int]] | None = None,
    ) -> BatchAnswer:  # fmt: skip
        """Up to `most` tokens after the prompts, the first from `logits`. temperature: 0 for greedy, else sampled.

        fed: tokens of each prompt, as many for all, that decode steps are fed before the answer; then the first token
        of the answer comes from the logits after them, and their steps are among those that are timed.
        """
        assert self.cache is not None
        session, cache = self.session, self.cache
        choose: Choose = greedy if fed is None else _likeliest
        if temperature:
            draw = torch.Generator(session.model.device).manual_seed(seed)
            choose = Sampler(session.model, temperature, 0, 1.0, draw)
        runs, seen = list[DecodeRun](), list[Tensor]()
        with memory_errors(), cache.rollback(session.decode), session.prompt_end(cache.columns):
            if fed is not None:
                feeding = Fed(torch.tensor(fed, device=session.model.device))
                runs.append(DecodeRun(session, len(fed[0]) + 1, _ends(session, ()), feeding, graph=self.graph))
                with closing(runs[-1].tokens(cache, logits)) as tokens:
                    for _ in tokens:
                        pass
                logits = feeding.logits
            runs.append(DecodeRun(session, most, _ends(session, stop), choose, graph=self.graph))
            with closing(runs[-1].tokens(cache, logits)) as tokens:
                seen.extend(tokens)
        rows = torch.stack(seen, 1).tolist()
        ended = [next((i for i, t in enumerate(row) if t in stop), None) for row in rows]
        return BatchAnswer(
            tuple(tuple(row[:end]) for row, end in zip(rows, ended, strict=True)),
            tuple(end is not None for end in ended),
            sum(run.setup_seconds for run in runs),
            sum(run.decode_seconds for run in runs),
            sum(run.steps for run in runs),
            runs[0].not_captured_reason,
            sum(run.evict_seconds for run in runs),
        )


def _warm_up(session: Session, cache: LongreachCache, logits: Tensor, most: int, graph: GraphOption) -> None:
    if most < 2 or capture_for(session, graph)[0] is not None:
        return
    run = DecodeRun(session, most, _ends(session, ()), graph=graph)
    with (
        memory_errors(),
        cache.rollback(session.decode),
        session.prompt_end(cache.columns),
        closing(run.tokens(cache, logits)) as tokens,
    ):
        next(tokens)  # made by no step
        next(tokens)
    session.reset_report()


class Fed:
    """Chooses the tokens [B, T] one column after the other; then keeps the logits that follow."""

    def __init__(self, tokens: Tensor):
        self._columns = iter(tokens.unbind(1))
        self.logits = torch.empty(0)

    def __call__(self, logits: Tensor) -> Tensor:
        column = next(self._columns, None)
        if column is None:
            self.logits = logits.clone()  # a captured step writes over its own
            return _likeliest(logits)
        return column


def _likeliest(logits: Tensor) -> Tensor:
    """As `greedy`, on the host: with it a run shares the step of one that is fed."""
    return logits.argmax(-1)


def _ends(session: Session, stop: Sequence[int]) -> Ends:
    """The ends of answers, without stop tokens that the model's vocabulary lacks."""
    size = vocabulary_of(session.model)
    return Ends(tuple(token for token in stop if token < size), 0)
