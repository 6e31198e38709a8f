"""Perplexity of long texts with every method: of prompts read with it, and of tokens decoded with it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longreach.adapters.transformers import Answer, Reader, attach, check_length, encode, shape_of
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.methods import Spec, by_prefill
from longreach.evals.progress import Progress, unseen
from longreach.evals.reads import Reads, phase_bytes
from longreach.methods.base import AttentionMethod

BINS = 16  # of positions


@dataclass
class Curve:
    """Sums of -log p, in nats, by position in the window: bins of equal width over [start, stop)."""

    start: int
    stop: int
    sums: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        bins = min(BINS, self.stop - self.start)
        self.edges = [self.start + (self.stop - self.start) * i // bins for i in range(bins + 1)]
        self.sums, self.tokens = [0.0] * bins, [0] * bins

    def add(self, nll: Tensor) -> None:
        """nll [stop - start]: of the tokens at these positions."""
        for i in range(len(self.sums)):
            part = nll[self.edges[i] - self.start : self.edges[i + 1] - self.start].double()
            self.sums[i] += float(part.sum())
            self.tokens[i] += len(part)

    def to_json(self) -> dict[str, Any]:
        """perplexity = exp(nll), nll the mean over all tokens; by_position the same of each bin."""
        mean = sum(self.sums) / sum(self.tokens)
        rows = zip(self.edges, self.edges[1:], self.sums, self.tokens, strict=False)
        return {
            "perplexity": math.exp(mean),
            "nll": mean,
            "tokens": sum(self.tokens),
            "by_position": [{"start": a, "stop": b, "nll": s / n, "tokens": n} for a, b, s, n in rows],
        }


@dataclass(frozen=True)
class Text:
    """A file's tokens without special ones."""

    name: str
    sha256: str
    characters: int
    tokens: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": len(self.tokens)}


def read_text(path: Path, tokenizer: Any) -> Text:
    """Raises InvalidInput for a file that cannot be read, is no UTF-8 text or is empty."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path given to --text") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is no UTF-8 text (byte {error.start}); convert it, for example with iconv"
        ) from error
    if not text.strip():
        raise InvalidInput(f"{path} is empty; give a file with text in it")
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    return Text(path.name, hashlib.sha256(content).hexdigest(), len(text), ids)


class Perplexity:
    """Texts cut into windows of `length` tokens, each begun with the tokenizer's beginning of text where it has one.

    decode_tokens: tokens of each window, its last, that are fed one by one through the decode methods after the rest
    was read with the prefill method; 0 for none. Raises InvalidInput where no window is whole, a window exceeds the
    model's context, or decoding leaves nothing to be read.
    """

    def __init__(
        self, model: Any, tokenizer: Any, texts: Sequence[Text], specs: Sequence[Spec], *, length: int = 4096,
        decode_tokens: int = 256, limit: int | None = None, graph: bool | None = None,
    ):  # fmt: skip
        check_length(model, length, 0)
        if not 0 <= decode_tokens <= length - 3:
            raise InvalidInput(f"decode tokens: expected 0 to {length - 3} of windows of {length}, got {decode_tokens}")
        for spec in specs:
            for method in (spec.prefill, spec.decode):
                method.check(shape_of(model))
        self.model, self.specs, self.length, self.decode_tokens, self.graph = model, specs, length, decode_tokens, graph
        begin = encode(tokenizer, "")
        self.windows = [
            [*begin, *text.tokens[at : at + length - len(begin)]]
            for text in texts
            for at in range(0, len(text.tokens) - (length - len(begin)) + 1, length - len(begin))
        ][:limit]
        if not self.windows:
            longest = max((len(text.tokens) for text in texts), default=0)
            raise InvalidInput(
                f"the longest text has {longest} tokens, a window takes {length - len(begin)}; lower --length, or give "
                f"longer texts"
            )

    def run(self, chunk: int, progress: Progress = unseen) -> Iterator[tuple[str, dict[str, Any]]]:
        """(label, its part of a record) of every method; windows are read once for those that share a prefill."""
        for prefill, specs in by_prefill(self.specs):
            yield from self._group(prefill, specs, chunk, progress)

    def _group(
        self, prefill: AttentionMethod, specs: list[Spec], chunk: int, progress: Progress
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        whole, split = Curve(1, self.length), self.length - self.decode_tokens
        decoded = {spec.label: Curve(split, self.length) for spec in specs} if self.decode_tokens else {}
        read, took = list[list[int]](), 0.0
        bytes_of: Mapping[str, list[list[int]]] = {spec.label: [] for spec in specs}
        times = {spec.label: Answer() for spec in specs}
        with (
            attach(self.model, prefill=prefill, cache=CacheConfig(capacity=self.length)) as session,
            progress(f"{prefill.name} prefill, {len(specs)} methods", self.length * len(self.windows)) as advance,
        ):
            reader = Reader(session, chunk, graph=self.graph)
            for window in self.windows:
                session.reset_report()
                with reader.aside():
                    whole.add(reader.score(window, advance).cpu())
                    read.append(phase_bytes(session.report(), "prefill") or [0] * 4)
                    if self.decode_tokens:
                        reader.cache.drop_columns(self.decode_tokens + 1)
                    for spec in specs if self.decode_tokens else ():
                        session.switch(spec.decode)
                        with reader.aside():
                            decoded[spec.label].add(self._decode(reader, window, times[spec.label]))
                        bytes_of[spec.label].append(phase_bytes(session.report(), "decode") or [0] * 4)
            took = reader.read_seconds
        for spec in specs:
            steps, seconds = times[spec.label].steps, times[spec.label].decode_seconds
            yield (
                spec.label,
                {
                    "prefill": whole.to_json(),
                    "decode": decoded[spec.label].to_json() if decoded else None,
                    "prefill_reads": _shares(read),
                    "decode_reads": _shares(bytes_of[spec.label]),
                    "seconds": {"read": took / len(self.windows), "per_token": seconds / steps if steps else None},
                },
            )

    def _decode(self, reader: Reader, window: list[int], times: Answer) -> Tensor:
        """-log p [decode_tokens] of the window's last tokens, each fed in its turn."""
        rest = torch.tensor(window[-self.decode_tokens - 1 :], device=self.model.device)
        found: list[Tensor] = []
        calls = iter(range(len(rest) + 1))

        def choose(logits: Tensor) -> Tensor:
            at = min(next(calls), len(rest) - 1)
            if at:  # what comes before the first token that is fed was read, not decoded
                found.append(-logits[0].float().log_softmax(0)[rest[at]])
            return rest[at : at + 1]

        answer = Answer()
        anything = torch.zeros(1, device=self.model.device)
        with closing(reader.decode(anything, len(rest), answer, choose=choose)) as tokens:
            for _ in tokens:
                pass
        times.decode_seconds += answer.decode_seconds
        times.steps += answer.steps
        return torch.stack(found).cpu()


def _shares(read: list[list[int]]) -> dict[str, float] | None:
    total = Reads.over([sum(column) for column in zip(*read, strict=True)])
    return None if total is None else asdict(total)
