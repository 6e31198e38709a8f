"""Read a batch of prompts once, answer them with several decode methods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop.decoder import vocabulary_of
from longreach.adapters.transformers.loop.prefill import prefill
from longreach.adapters.transformers.loop.run import DecodeRun, now
from longreach.adapters.transformers.loop.sampling import Ends, Sampler, greedy
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.prompt_reader import CHUNK, Advance


@dataclass(frozen=True)
class BatchAnswer:
    """Answers to the prompts of a batch, in their order.

    tokens: without the stop token; stopped: which ended with one. setup_seconds, decode_seconds, steps: see
    `loop.DecodeRun`.
    not_captured: why the steps were not one CUDA graph, None where they were.
    """

    tokens: tuple[tuple[int, ...], ...]
    stopped: tuple[bool, ...]
    setup_seconds: float
    decode_seconds: float
    steps: int
    not_captured: str | None


class BatchReader:
    """Prompts in the KV cache of a session; every answer starts from them and leaves them as they were.

    Caches are kept, one for each batch size, so that what was captured for a method serves all batches to come.
    chunk: prompt columns per pass. graph: whether decode steps are captured, as in `generate`.
    """

    def __init__(self, session: Session, chunk: int = CHUNK, *, graph: bool | None = None):
        self.session, self.chunk, self.graph = session, chunk, graph
        self._caches: dict[int, LongreachCache] = {}
        self.cache: LongreachCache | None = None
        self.read_seconds = 0.0

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]], progress: Advance = lambda done: None) -> Tensor:
        """Put prompts into the cache in the place of earlier ones; logits [B, V] after them. progress: columns read.

        Raises CapacityError, OutOfMemory; then nothing is held.
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
            logits = prefill(self.session, cache, ids, mask, self.chunk, progress)
        self.read_seconds = now(self.session.model) - started
        self.cache = cache
        return logits

    @torch.no_grad()
    def answer(
        self, logits: Tensor, most: int, stop: Sequence[int], *, temperature: float = 0.0, seed: int = 0
    ) -> BatchAnswer:
        """Up to `most` tokens after what was read, the first from `logits`. temperature: 0 for greedy, else drawn."""
        assert self.cache is not None
        session, cache = self.session, self.cache
        makes = vocabulary_of(session.model)
        choose = greedy
        if temperature:
            draw = torch.Generator(session.model.device).manual_seed(seed)
            choose = Sampler(session.model, temperature, 0, 1.0, draw)
        ends = Ends(tuple(t for t in stop if t < makes), 0)
        run, columns, seen = DecodeRun(session, most, ends, choose, graph=self.graph), cache.columns, list[Tensor]()
        with (
            memory_errors(), cache.rollback(session.decode), session.prompt_end(columns),
            closing(run.tokens(cache, logits)) as tokens,
        ):  # fmt: skip
            seen.extend(tokens)
        rows = torch.stack(seen, 1).tolist()
        ended = [next((i for i, t in enumerate(row) if t in stop), None) for row in rows]
        return BatchAnswer(
            tuple(tuple(row[:end]) for row, end in zip(rows, ended, strict=True)),
            tuple(end is not None for end in ended),
            run.setup_seconds,
            run.decode_seconds,
            run.steps,
            run.not_captured_reason,
        )
