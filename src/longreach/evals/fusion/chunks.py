"""Prompts whose documents are chunks computed alone, behind BOS or behind the system prompt, read by fusion methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import Tensor

from longreach.adapters.transformers import (
    BatchReader,
    DependenceMeter,
    FusedPrompt,
    FusionReport,
    Precompute,
    Reader,
    Session,
    encode,
)
from longreach.adapters.transformers.fingerprint import fingerprint
from longreach.adapters.transformers.prompt_tokens import uses_chunk_frequencies
from longreach.errors import InvalidInput
from longreach.evals.fusion.controls import Noted, resolved
from longreach.evals.fusion.memory import moved
from longreach.methods.slots import Eviction, Fusion

Behind = Literal["alone", "bos", "system"]
BEHIND: tuple[Behind, ...] = get_args(Behind)


def prefix_tokens(tokenizer: Any, behind: Behind, ids: Sequence[int], first: int) -> tuple[int, ...]:
    """What the chunks of a prompt are computed behind. first: where its first chunk begins.

    Raises InvalidInput for "bos" where the tokenizer puts no token before a text.
    """
    if behind == "alone":
        return ()
    if behind == "system":
        return tuple(ids[:first])
    special = tuple(encode(tokenizer, ""))
    if not special:
        raise InvalidInput("the tokenizer puts no token before a text, so that chunks behind BOS are chunks alone")
    return special


class FusedPrompts:
    """Chunks of prompts, and reads of them by any fusion and eviction method, over one session.

    session: attached with a fusion method and without eviction; `read` takes the methods of each read. chunk: prompt
    tokens per pass where a prompt is read plainly, and while chunks are computed. graph: as in `generate`, for answers
    without eviction; it moves memory, so that with it a captured step would be captured anew for every prompt.
    dependence: whether chunks that are not exact get that of their tokens: behind the first chunk, and the first one
    behind the second. The only chunk of a prompt has no other: it is run behind its own first tokens, as many as the
    rest of the prompt has, so that this takes no more room than the prompt.
    Raises as `Precompute`, and as `prefix_tokens`.
    """

    def __init__(
        self, session: Session, tokenizer: Any, behind: Behind, chunk: int, *, graph: bool | None = None,
        dependence: bool = False,
    ):  # fmt: skip
        self.session, self._behind, self._chunk, self._dependence = session, behind, chunk, dependence
        self._reader, self._evicting = (
            BatchReader(session, chunk, graph=graph),
            BatchReader(session, chunk, graph=False),
        )
        self._tokenizer, self._known = tokenizer, fingerprint(session.model)
        self._work: tuple[tuple[int, ...], Precompute, DependenceMeter] | None = None
        self._plain: Reader | None = None
        self._moved: tuple[FusedPrompt, Tensor] | None = None

    def of(self, ids: Sequence[int], chunks: Sequence[tuple[int, int]]) -> FusedPrompt:
        """The prompt with its chunks [start, stop) computed. Raises as `Precompute.compute`."""
        prefix = prefix_tokens(self._tokenizer, self._behind, ids, chunks[0][0])
        if self._work is None or self._work[0] != prefix:
            work = Precompute(self.session, prefix, chunk=self._chunk, known=self._known)
            self._work = prefix, work, DependenceMeter(work)
        _, work, meter = self._work
        parts, end, same = list[Any](), 0, uses_chunk_frequencies(self.session.model, len(ids))
        first, second = chunks[0], chunks[min(1, len(chunks) - 1)]
        for number, (start, stop) in enumerate(chunks):
            chunk = work.compute(ids[start:stop])
            exact = same and tuple(ids[:start]) == prefix
            if self._dependence and not exact:
                room = len(ids) - len(prefix) - (stop - start)  # two chunks of a prompt have it
                chunk = meter.measured(chunk, ids[slice(*(first if number else second))][:room])
            parts += [ids[end:start], chunk]
            end = stop
        return FusedPrompt.of([*parts, ids[end:]])

    def read(
        self, prompt: FusedPrompt, fuse: Fusion, evict: Eviction | None = None, *, noted: list[Tensor] | None = None
    ) -> tuple[BatchReader, Tensor, FusionReport]:
        """A reader whose cache holds the prompt, to answer from, and logits [1, V] after it; raises as `fusing.read`.

        The session's report begins with it. What controls need of a plain prefill comes first, in neither the report
        nor `reader.read_seconds`. noted: receives each choice of the method, int64 [r].
        """
        fusion, prefill = resolved(fuse, lambda: self.moved(prompt))
        if noted is not None:
            fusion = Noted(fusion, noted)
        self.session.reset_report()
        with self._given(fuse=fusion, prefill=prefill, evict=evict):
            reader = self._reader if evict is None else self._evicting
            return reader, *reader.read_fused(prompt)

    def moved(self, prompt: FusedPrompt) -> Tensor:
        """How far a plain prefill moves each token's keys and values, as `memory.moved`; kept for the last prompt."""
        if self._moved is None or self._moved[0] is not prompt:
            self._plain = self._plain or Reader(self.session, self._chunk)
            self._moved = prompt, moved(self.session, self._plain, prompt)
        return self._moved[1]

    @contextmanager
    def _given(self, **methods: Any) -> Iterator[None]:
        """Within this block the session has these methods; afterwards its own, with which chunks are computed."""
        before = {name: getattr(self.session, name) for name in methods}
        try:
            for name, method in methods.items():
                setattr(self.session, name, method)
            yield
        finally:
            for name, method in before.items():
                setattr(self.session, name, method)
